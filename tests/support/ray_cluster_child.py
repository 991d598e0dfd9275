"""A Ray cluster of several nodes on this machine, as a process of its own;
`tests.support.ray_cluster` starts it.

Commands come line by line on standard input: `add {"num_cpus": 1}` starts a node, `kill 2` kills
the node of that number, `autoscale {"max_workers": 3}` starts Ray's autoscaler on the head, and
`held` counts actors and placement groups; each is answered by a line. At the end of the input all
nodes are ended.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from ray._private.node import Node
from ray.cluster_utils import Cluster

SMALL = {
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
HEAD_KIND = "ray.head.default"
COMMANDS = (
    "initialization",
    "setup",
    "head_setup",
    "worker_setup",
    "head_start_ray",
    "worker_start_ray",
)
"""Kinds of commands that Ray's autoscaler expects in its configuration."""
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
        elif command == "autoscale":
            _start_autoscaler(cluster.head_node, json.loads(rest))
        elif command.strip() == "held":
            print(_held(cluster), flush=True)
            continue
        else:
            options = {**SMALL, **json.loads(rest)}
            if not nodes:
                cluster = _with_head(options)
                nodes.append(cluster.head_node)
            else:
                nodes.append(cluster.add_node(**options))
        print(cluster.address, flush=True)
    cluster.shutdown()


def _start_autoscaler(head: Node, limits: dict[str, object]) -> None:
    """Start Ray's autoscaler with its provider of nodes on this machine; each node has one CPU.

    `AutoscalingCluster` of `ray.cluster_utils` does the same, but it ends every Ray process of the
    machine first.
    """
    config = {
        "cluster_name": "test",
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": head.gcs_address,
            "head_node_id": head.node_id,
            "launch_multiple": True,
        },
        "available_node_types": {
            HEAD_KIND: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": SMALL["object_store_memory"]},
                "node_config": {},
                "min_workers": 0,
                "max_workers": limits["max_workers"],
            },
        },
        "head_node_type": HEAD_KIND,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 10.0,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **dict.fromkeys(("cluster_synced_files", "rsync_exclude", "rsync_filter"), ()),
        **dict.fromkeys((f"{kind}_commands" for kind in COMMANDS), ()),
        "file_mounts_sync_continuously": False,
        **limits,
    }
    path = Path(os.environ["RAY_TMPDIR"]) / "autoscaler.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    head._ray_params.autoscaling_config = str(path)
    head.start_monitor()


def _held(cluster: Cluster) -> int:
    state = cluster.global_state
    groups = [group["state"] for group in state.placement_group_table().values()]
    return len(state.actor_table(None, None, "ALIVE")) + sum(name != "REMOVED" for name in groups)


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
