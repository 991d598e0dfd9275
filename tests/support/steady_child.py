"""A shard and a worker in one process over sockets; prints the pages touched anew by each
iteration once warm.
"""

from __future__ import annotations

import json
import resource
import sys
from itertools import pairwise

import numpy as np

from ps_server import Client, Keeping, Rule, RuleKind, StoreSpec, TableSpec
from tests.support.cluster import run_workers, socket_store

WARM_UP, ITERATIONS = 15, 30


def main(kind: str, elements: int) -> None:
    """Train two tables of `elements` together, one large and one averaged."""
    rule = Rule(kind=RuleKind(kind), momentum=0.9, momentum2=0.99, decay=0.01)
    tables = (
        TableSpec(name="w", size=elements * 3 // 4, rule=rule),
        TableSpec(name="mean", size=elements // 4, keeping=Keeping.AVERAGE),
    )
    store = StoreSpec(workers=1, shards=1, tables=tables)
    pages: list[int] = []

    def body(client: Client, rank: int) -> None:
        values = [np.ones(table.size, dtype=np.float32) for table in tables]
        gradients = [np.ones(table.size, dtype=np.float32) for table in tables]
        client.bind(0, values[0])
        client.start(lambda table: [values[table]])
        for _ in range(WARM_UP + ITERATIONS):
            pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
            for table in reversed(range(len(tables))):
                client.push(table, gradients[table], rate=1e-3)
            client.clock()
            for table, value in enumerate(values):
                client.read(table, value)

    with socket_store(1, 1) as connect:
        run_workers(connect, store, body)
    print(json.dumps([after - before for before, after in pairwise(pages)][WARM_UP:]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
