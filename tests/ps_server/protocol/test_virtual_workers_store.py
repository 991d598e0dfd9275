"""A store under virtual workers: its values are the same for every number of workers and shards."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from ps_server import Client, CodecPair, Keeping, Precision, Rule, RuleKind, StoreSpec, TableSpec
from ps_server.protocol.messages import Array
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from tests.support.cluster import memory_store, run_workers

V, STEPS = 7, 3
SIZES = (9000, 30, 20_000)


def gradient(virtual_worker: int, table: int, step: int) -> Array:
    draw = np.random.default_rng([virtual_worker, table, step])
    return draw.standard_normal(SIZES[table]).astype(np.float32)


def tables(**more: object) -> tuple[TableSpec, ...]:
    rule = Rule(kind=RuleKind.ADAM, momentum=0.9)
    return tuple(
        TableSpec(name=f"t{i}", size=size, rule=rule, **more)  # type: ignore[arg-type]
        for i, size in enumerate(SIZES)
    )


def trained(bounds: tuple[int, ...], shards: int = 1, **store: object) -> list[bytes]:
    """Return the values of rank 0 after some steps."""
    placed = VirtualWorkers(bounds)
    spec = StoreSpec(
        workers=placed.processes,
        shards=shards,
        virtual_workers=placed,
        **{"tables": tables(), **store},  # type: ignore[arg-type]
    )
    found: list[list[bytes]] = [[] for _ in range(placed.processes)]

    def work(client: Client, rank: int) -> None:
        values = [np.zeros(table.size, np.float32) for table in spec.tables]
        client.start(lambda index: [values[index]])
        for step in range(STEPS):
            for index in reversed(range(len(values))):
                nodes = spec.nodes(spec.tables[index], rank)
                tree = TreeSum[Array](V, lambda left, right, _: left + right)
                for v in placed.of(rank):
                    node = Node(v, v + 1)
                    if node in nodes:
                        client.push(index, gradient(v, index, step), rate=0.1)
                    elif (node := tree.put(node, gradient(v, index, step))) in nodes:
                        client.push(index, tree.parts.pop(node), rate=0.1)
            client.clock()
            for index, value in enumerate(values):
                client.read(index, value)
        found[rank] = [value.tobytes() for value in values]

    with memory_store(placed.processes, shards) as connect:
        run_workers(connect, spec, work)
    assert all(values == found[0] != [] for values in found)
    return found[0]


PLACES = [(0, 7), (0, 3, 7), (0, 2, 4, 7), tuple(range(8))]


@pytest.mark.parametrize(
    "store",
    [
        {},
        {"clip": 3.0},
        {"precision": Precision.BFLOAT16},
        {"tables": tables(codec=CodecPair.parse("int8")), "clip": 3.0},
        {"tables": tables(codec=CodecPair.parse("topk:0.1/none"))},
        {"tables": tables(keeping=Keeping.AVERAGE)},
    ],
    ids=str,
)
def test_values_do_not_depend_on_the_number_of_workers_or_shards(store: dict[str, object]) -> None:
    expected = trained(PLACES[-1], 2, **store)
    for shards, bounds in enumerate(PLACES, start=1):
        assert trained(bounds, shards, **store) == expected


def test_the_average_is_that_of_the_tree() -> None:
    mean = tables()[:1]
    mean = (TableSpec(name="mean", size=SIZES[0], rule=Rule(kind=RuleKind.MEAN)),)
    tree = TreeSum[torch.Tensor](V, lambda left, right, _: left + right)
    for v in range(V):
        tree.put(Node(v, v + 1), torch.from_numpy(gradient(v, 0, STEPS - 1)))
    expected = (tree.parts[Node(0, V)] / V).numpy().tobytes()
    assert trained((0, 2, 7), tables=mean) == [expected]


def test_each_worker_holds_back_for_its_own_virtual_workers() -> None:
    spec = StoreSpec(
        workers=2,
        shards=1,
        tables=tables(codec=CodecPair.parse("int8"))[:1],
        virtual_workers=VirtualWorkers((0, 3, 4)),
    )
    with memory_store(2, 1) as connect:
        clients = [connect(rank, spec) for rank in range(2)]
        assert [list(client.held_back(0)) for client in clients] == [[0, 1, 2], [3]]
        for client in clients:
            client.close(leave=False)


def test_a_table_of_several_tensors_is_not_cut() -> None:
    shared = TableSpec(name="small", size=12_000, parts=(4000, 4000, 4000))
    assert shared.is_whole
    assert list(pairwise((0, *np.cumsum(shared.parts))))[-1] == (8000, 12_000)
