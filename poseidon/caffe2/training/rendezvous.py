"""The store in which the shards of the trainer meet: by the flags of each shard, or in a job of
`poseidon run`.
"""

from __future__ import annotations

import argparse
from typing import Any, Protocol

import torch
from torch import Tensor

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.shards.rendezvous import published_address
from poseidon.caffe2.training.flags import Plan
from poseidon.caffe2.workspace.current import current
from poseidon.errors import UsageError

STORE = "store_handler"
"""The blob of the store's handler."""
LONGEST_ADDRESS = 128
"""Bytes of an address and a port."""


class Group(Protocol):
    """What `poseidon.distribute` returns."""

    def mean(self, numbers: Tensor) -> Any:
        """Return the mean over the workers."""


def from_flags(args: argparse.Namespace, plan: Plan) -> dict[str, Any] | None:
    """Make the store that the flags name: Redis where there is a host of one, else a folder;
    None for one shard.

    Raises:
        UsageError: there is no run id.
        RuntimeError: the store cannot be reached.
    """
    if plan.shards == 1:
        return None
    if args.run_id is None:
        raise UsageError(
            "--run_id is missing: expected a name for this start, the same on all shards"
        )
    if args.redis_host:
        kind = "RedisStoreHandlerCreate"
        where: dict[str, Any] = {"host": args.redis_host, "port": args.redis_port}
    else:
        kind, where = "FileStoreHandlerCreate", {"path": args.file_store_path}
    workspace.RunOperatorOnce(
        core.CreateOperator(kind, [], [STORE], prefix=str(args.run_id), **where)
    )
    return _rendezvous(args, plan)


def in_job(args: argparse.Namespace, plan: Plan, group: Group) -> dict[str, Any]:
    """Make a store in the memory of rank 0, and tell the other workers of the job its address.

    Args:
        args: the flags.
        plan: the shards are the workers of the job.
        group: the workers.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    host = published_address(_interface(args) or None)
    if plan.shard == 0:
        _tcp_store(host, 0, serve=True)
        port = current().get(STORE).value.store.port
        _broadcast(group, f"{host} {port}", plan.shards)
    else:
        host, _, port = _broadcast(group, "", plan.shards).rpartition(" ")
        _tcp_store(host, int(port), serve=False)
    return _rendezvous(args, plan)


def _rendezvous(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "kv_handler": STORE,
        "shard_id": plan.shard,
        "num_shards": plan.shards,
        "engine": "GLOO",
        "transport": args.distributed_transport,
        "interface": _interface(args),
        "exit_nets": None,
    }


def _interface(args: argparse.Namespace) -> str:
    """Return the first of the network interfaces, as Caffe2 did."""
    interfaces: str = args.distributed_interfaces
    return interfaces.partition(",")[0]


def _tcp_store(host: str, port: int, *, serve: bool) -> None:
    workspace.RunOperatorOnce(
        core.CreateOperator(
            "TCPStoreHandlerCreate",
            [],
            [STORE],
            host=host,
            port=port,
            prefix="trainer",
            serve=int(serve),
        )
    )


def _broadcast(group: Group, text: str, workers: int) -> str:
    """Return rank 0's text on all workers; the others give an empty one."""
    numbers = torch.zeros(LONGEST_ADDRESS, dtype=torch.int64)
    numbers[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.int64)
    sums = torch.as_tensor(group.mean(numbers)) * workers
    return bytes(round(float(number)) for number in sums).rstrip(b"\0").decode()
