"""Shards of a data-parallel model, each a process of its own, forked from a server that has
imported everything.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from poseidon.caffe2 import core, data_parallel_model, workspace
from poseidon.caffe2.operators.registry import registered
from poseidon.errors import PoseidonError
from tests.support import caffe2_replicas as replicas

# torch imports seconds of code at its first operation on shapes, and the first operator of a net
# imports all operators: here, once, and not in each shard.
torch.empty(1, device="meta") + 1
registered()

LIMIT_S = 50.0
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all shards of a run have in common.

    Attributes:
        store: the operator that makes the store handler, and its arguments.
        sizes: the batch of each shard.
        devices: of each shard.
        iterations: how long they train.
        weighted: whether the batch sizes are given to Parallelize.
        bmuf: whether they train blockwise, a block of two iterations at a time.
        dies: the shard that ends in the middle of the last iteration.
        layers: the builder function of the forward pass.
        parallelize: more arguments of Parallelize.
    """

    store: tuple[str, dict[str, Any]]
    sizes: tuple[int, ...]
    devices: tuple[int, ...] = (0,)
    iterations: int = 10
    weighted: bool = False
    bmuf: bool = False
    dies: int = -1
    layers: Any = replicas.add_layers
    parallelize: dict[str, Any] = field(default_factory=dict)


def folder(path: Path, run: str = "run") -> tuple[str, dict[str, Any]]:
    """Return the store in a folder."""
    path.mkdir(exist_ok=True)
    return "FileStoreHandlerCreate", {"path": str(path), "prefix": run}


def train(run: Run, shards: Sequence[int] | None = None) -> list[Any]:
    """Return what each shard ends with: its parameters by device, or the sentence of its error;
    None where it died.
    """
    numbers = range(len(run.sizes)) if shards is None else shards
    _context.set_forkserver_preload([__name__])  # now: code under test sets it, too
    ends = []
    for shard in numbers:
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_shard, args=(run, shard, sender), daemon=True)
        process.start()
        sender.close()
        ends.append((process, receiver))
    results = []
    for _, receiver in ends:
        try:
            assert receiver.poll(LIMIT_S), "a shard hangs"
            results.append(receiver.recv())
        except EOFError:
            results.append(None)
        finally:
            receiver.close()
    for process, _ in ends:
        process.join(LIMIT_S)
        process.close()
    return results


def whole_batch(step: int, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch of all shards."""
    return replicas.batch(step, sum(run.sizes))


def _shard(run: Run, shard: int, sender: Connection) -> None:
    try:
        sender.send(_trained(run, shard))
    except PoseidonError as error:
        sender.send(str(error))


def _trained(run: Run, shard: int) -> list[dict[str, np.ndarray]]:
    kind, arguments = run.store
    workspace.RunOperatorOnce(core.CreateOperator(kind, [], ["store"], **arguments))
    rendezvous = {
        "kv_handler": "store",
        "num_shards": len(run.sizes),
        "shard_id": shard,
        "engine": "GLOO",
    }
    given = {"rendezvous": rendezvous, "forward_pass_builder_fun": run.layers, **run.parallelize}
    if run.weighted:
        given["shard_batch_sizes"] = run.sizes
    model = (
        replicas.build_bmuf(run.devices, **given)
        if run.bmuf
        else replicas.build(run.devices, **given)
    )
    begin = sum(run.sizes[:shard])

    def feed(step: int) -> None:
        data, labels = whole_batch(step, run)
        replicas.feed(
            model, data[begin : begin + run.sizes[shard]], labels[begin : begin + run.sizes[shard]]
        )

    feed(0)
    # shard 0's values win, but in blocks
    replicas.start(model, seed=7 if run.bmuf else 7 + 100 * shard)
    for step in range(run.iterations):
        feed(step)
        if shard == run.dies and step == run.iterations - 1:
            os._exit(1)
        data_parallel_model.RunNet(model, 2 if run.bmuf else 1)
    return [replicas.params(model, device) for device in run.devices]
