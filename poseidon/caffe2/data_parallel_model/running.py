"""The running of a parallelized model: its init nets, its nets, and barriers between its shards."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.data_parallel_model.collectives import between_hosts, common_world
from poseidon.caffe2.data_parallel_model.replicas import check_parallelized

BARRIER_TIMEOUT_S = 300
"""Longest time that a shard waits for the others before an epoch, as in Caffe2."""


def set_nets(
    model: Any, init_nets: list[Any], nets: list[Any], barrier_net_timeout_sec: float
) -> None:
    """Store in the model the nets that `RunInitNet` and `RunNet` run; with several shards they
    begin with a barrier.

    The barrier lets fast shards wait for slow ones before an epoch, longer than a collective
    operation may.

    Args:
        model: the model.
        init_nets: run once, in order.
        nets: run in order; a pair of a net and a number is run so often, whatever `RunNet` asks
            for.
        barrier_net_timeout_sec: longest time that the barrier waits.
    """
    model._data_parallel_model_init_nets = init_nets
    model._data_parallel_model_nets = nets
    if model._rendezvous is not None and model._rendezvous["engine"] in ("GLOO", "NCCL"):
        model._barrier_init_net = core.Net("barrier_init_net")
        model._barrier_net = _barrier(
            model, model._barrier_init_net, "pre_training", barrier_net_timeout_sec
        )
        init_nets.insert(0, model._barrier_init_net)
        nets.insert(0, (model._barrier_net, 1))


def _barrier(model: Any, init_net: Any, name: str, timeout_sec: float) -> Any:
    engine = model._rendezvous["engine"]
    world = common_world(init_net, f"{name}_barrier_cw", model._rendezvous, timeout_sec)
    net = core.Net(f"{name}_barrier_net")
    net.Barrier([world], [], engine=engine)
    return net


def CreateNet(model: Any, overwrite: bool = False) -> None:
    """Create the nets of a parallelized model."""
    check_parallelized(model)
    for net in model._data_parallel_model_nets:
        workspace.CreateNet(net[0] if isinstance(net, tuple) else net, overwrite=overwrite)


def RunInitNet(model: Any) -> None:
    """Fill the parameters of a parallelized model, and create its nets.

    Raises:
        JobError: shards do not find each other.
    """
    check_parallelized(model)
    for net in model._data_parallel_model_init_nets:
        workspace.RunNetOnce(net)
    CreateNet(model)


def RunWarmup(model: Any) -> None:
    """Run the warm-up iterations of a BMUF model, each device alone, and broadcast the
    parameters of the first.
    """
    workspace.RunNet(model.net, model._warmup_iterations)
    workspace.RunNetOnce(model._warmup_broadcast)


def RunNet(model: Any, num_iterations: int) -> None:
    """Run a parallelized model.

    Args:
        model: a model for which `RunInitNet` was called.
        num_iterations: of the training net; with BMUF the blockwise update follows once.
    """
    check_parallelized(model)
    for net in model._data_parallel_model_nets:
        name, count = net if isinstance(net, tuple) else (net, num_iterations)
        workspace.RunNet(name, count)


def Synchronize(model: Any, timeout_sec: float = BARRIER_TIMEOUT_S) -> None:
    """Wait until all shards have called this.

    `RunNet` does so by itself since Caffe2 1.0, so this is deprecated.

    Args:
        model: a parallelized model.
        timeout_sec: longest time to wait; the same in all calls.
    """
    warnings.warn(
        "Synchronize is deprecated: RunNet waits for all shards first, for "
        "barrier_net_timeout_sec at most",
        category=DeprecationWarning,
        stacklevel=2,
    )
    check_parallelized(model)
    if not between_hosts(model._rendezvous):
        return
    if model._sync_barrier_net is None:
        init_net = core.Net("sync_barrier_init_net")
        model._sync_barrier_net = _barrier(model, init_net, "sync", timeout_sec)
        workspace.RunNetOnce(init_net)
        workspace.CreateNet(model._sync_barrier_net)
        model._sync_barrier_net_timeout = timeout_sec
    assert model._sync_barrier_net_timeout == timeout_sec, (
        f"Must use fixed timeout, {model._sync_barrier_net_timeout} != {timeout_sec}"
    )
    workspace.RunNet(model._sync_barrier_net)


def run_comparison(model: Any, blob_name: str, device: Any = None) -> bool:
    """Return True when a blob is the same on all shards.

    Args:
        model: a parallelized model; only its net and its rendezvous are used.
        blob_name: the blob.
        device: the device of the blob.

    Raises:
        AssertionError: the sum of its squares differs.
    """
    rendezvous = model._rendezvous
    if not between_hosts(rendezvous):
        return True
    engine, shards, shard = rendezvous["engine"], rendezvous["num_shards"], rendezvous["shard_id"]
    with core.DeviceScope(model._blob_to_device[blob_name] if device is None else device):
        own = np.zeros(shards, np.float32)
        own[shard] = 1
        workspace.FeedBlob("compare_arr", own)
        net = core.Net("allcompare_net")
        world = net.CreateCommonWorld(
            rendezvous["kv_handler"] or [],
            "initial_sync",
            name=f"{model.net.Proto().name}.cw_master_select",
            size=shards,
            rank=shard,
            engine=engine,
        )
        checksum = net.SumSqrElements([blob_name], [f"{blob_name}_checksum"], average=False)
        gathered = net.Mul(["compare_arr", checksum], f"{blob_name}_gather", broadcast=1)
        net.Allreduce([world, gathered], [gathered], engine=engine)
        workspace.RunNetOnce(net)
    sums = workspace.FetchBlob(str(gathered))
    assert (sums == sums[0]).all(), (
        f"allcompare failed on shard {shard}: the sums of squares of {blob_name} are "
        f"{sums.tolist()}"
    )
    return True
