"""A Ray cluster of several nodes on this machine, as a process of its own; `tests.support.ray_cluster` starts it.

Commands come line by line on standard input: `add {"num_cpus": 1}` starts a node, `kill 2` kills the node of that number;
each is answered by a line. At the end of the input all nodes are ended.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from ray.cluster_utils import Cluster

SMALL = {
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
HEAD_ATTEMPTS = 3
"""Ray gives a head 30 seconds to start, which a busy machine may not have."""


def main() -> None:
    """Serve the commands."""
    cluster = Cluster()
    nodes = []
    print("up", flush=True)
    for line in sys.stdin:
        command, _, rest = line.partition(" ")
        if command == "kill":
            cluster.remove_node(nodes[int(rest)], allow_graceful=False)
        else:
            options = {**SMALL, **json.loads(rest)}
            if not nodes:
                cluster = _with_head(options)
                nodes.append(cluster.head_node)
            else:
                nodes.append(cluster.add_node(**options))
        print(cluster.address, flush=True)
    cluster.shutdown()


def _with_head(options: dict[str, object]) -> Cluster:
    for attempt in range(1, HEAD_ATTEMPTS + 1):
        cluster = Cluster()
        try:
            cluster.add_node(**options)
            return cluster
        except Exception as error:
            print(error, file=sys.stderr)
            with suppress(Exception):
                cluster.shutdown()
            if attempt == HEAD_ATTEMPTS:
                raise
    raise AssertionError("no attempt was made")


if __name__ == "__main__":
    main()
