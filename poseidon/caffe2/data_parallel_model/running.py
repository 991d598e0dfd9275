"""How a parallelized model runs: steps, checkpoints, and batches of different sizes.

Shards of unequal speed: each gets its part of the batch, and all wait for one another less.

speeds = data_parallel_model.ExchangeValue(rendezvous, "images/s", measured)
sizes = data_parallel_model.BatchSizesBySpeed(192, speeds, multiple=len(gpus))
data_parallel_model.Parallelize_GPU(model, ..., rendezvous=rendezvous, shard_batch_sizes=sizes)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.data_parallel_model.collectives import (
    Rendezvous,
    between_hosts,
    common_world,
    sync,
)
from poseidon.caffe2.data_parallel_model.replicas import (
    blobs_to_sync,
    check_parallelized,
    group_of,
    scope_of,
    stripBlobName,
)
from poseidon.caffe2.predictor import predictor_py_utils
from poseidon.caffe2.shards.common_world import CommonWorld
from poseidon.caffe2.workspace.current import current

BARRIER_TIMEOUT_S = 300
"""Longest time that a shard waits for the others before an epoch, as in Caffe2."""


def set_nets(
    model: Any, init_nets: list[Any], nets: list[Any], barrier_net_timeout_sec: float
) -> None:
    """Store the nets of `RunInitNet` and `RunNet`; of several shards they begin with a barrier.

    The barrier lets fast shards wait for slow ones, longer than a collective operation may.

    Args:
        model: the model.
        init_nets: run once, in order.
        nets: run in order; a pair of a net and a number is run so often, whatever `RunNet` asks.
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
    """Run a BMUF model's warm-up, each device alone, and broadcast the first one's parameters."""
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
    assert (sums == sums[0]).all(), f"allcompare of {blob_name} failed on shard {shard}: {sums}"
    return True


COUNTERS = ("Iter", "AtomicIter")


def GetCheckpointParams(model: Any) -> set[Any]:
    """Return a complete checkpoint's blobs: the first device's, and counters outside scopes."""
    check_parallelized(model)
    blobs, _ = blobs_to_sync(model)
    first = scope_of(model, model._devices[0])
    counters = {op.output[0] for op in model.net.Proto().op if op.type in COUNTERS}
    outside = {name for name in counters if not name.startswith(f"{model._device_prefix}_")}
    return {blob for blob in blobs if str(blob).startswith(first)} | outside


def FinalizeAfterCheckpoint(
    model: Any, blobs: Iterable[Any] | None = None, cpu_mode: bool = False
) -> None:
    """Copy what a checkpoint has loaded on the first device to all devices and shards.

    Args:
        model: a parallelized model whose blobs of the first device are loaded.
        blobs: what to copy; by default all that `GetCheckpointParams` names with a device.
        cpu_mode: kept for Caffe2's scripts; each blob is copied where it is.
    """
    check_parallelized(model)
    if not hasattr(model, "_checkpoint_net"):
        names = {stripBlobName(b) for b in blobs} if blobs is not None else blobs_to_sync(model)[1]
        for name in names:
            group_of(model, name)
        model._checkpoint_net = core.Net("checkpoint_sync_net")
        init_net = core.Net("checkpoint_init_net")
        sync(model, init_net, model._checkpoint_net, names, max_concurrent_distributed_ops=1)
        if between_hosts(model._rendezvous):
            workspace.RunNetOnce(init_net)
        workspace.CreateNet(model._checkpoint_net)
    workspace.RunNet(model._checkpoint_net)


def GetLearningRateBlobNames(model: Any) -> list[str]:
    """Return the learning rates' blobs: the optimizer's, or of all LearningRate operators."""
    check_parallelized(model)
    optimizer = model._optimizer
    if optimizer is None:
        return [op.output[0] for op in model.net.Proto().op if op.type == "LearningRate"]
    if core.IsGPUDeviceType(model._device_type):
        return [optimizer.get_gpu_blob_name("lr", device, "") for device in model._devices]
    return [optimizer.get_cpu_blob_name("lr")]


def ExtractPredictorNet(
    model: Any, inputs: Sequence[str], outputs: Sequence[str], device: Any
) -> tuple[Any, list[Any]]:
    """Return the first device's net from inputs to outputs, and the parameters it reads.

    Args:
        model: a parallelized model for tests.
        inputs, outputs: names without the scope of a device; the net has these too.
        device: the device option of its operators.
    """
    check_parallelized(model)
    first = scope_of(model, model._devices[0])
    plain = [*inputs, *outputs]
    return predictor_py_utils.ExtractPredictorNet(
        net_proto=model.net.Proto(),
        input_blobs=[first + str(name) for name in inputs],
        output_blobs=[first + str(name) for name in outputs],
        device=device,
        renames={first + str(name): str(name) for name in plain},
    )


def BatchSizesBySpeed(total: int, speeds: Sequence[float], multiple: int = 1) -> list[int]:
    """Return the batch size of each shard, so that all take about the same time.

    Args:
        total: the sum of the batch sizes.
        speeds: images per second of each shard, above 0.
        multiple: what each batch size is a multiple of: the number of devices of a shard.

    Raises:
        ValueError: a speed is not above 0, or the total is not a large enough multiple.
    """
    if not speeds or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(f"speeds {list(speeds)}: expected a number above 0 for each shard")
    units, rest = divmod(total, multiple)
    if rest or units < len(speeds):
        raise ValueError(
            f"a batch of {total} for {len(speeds)} shards: expected a multiple of {multiple}, "
            f"{len(speeds) * multiple} or more"
        )
    wanted = [units * speed / sum(speeds) for speed in speeds]
    given = [max(1, math.floor(share)) for share in wanted]
    while sum(given) != units:
        step = 1 if sum(given) < units else -1
        legal = [i for i, size in enumerate(given) if size + step >= 1]
        chosen = max(legal, key=lambda i: (step * (wanted[i] - given[i]), -i))
        given[chosen] += step
    return [size * multiple for size in given]


def ExchangeValue(
    rendezvous: Rendezvous | None, name: str, value: float, timeout_sec: float = BARRIER_TIMEOUT_S
) -> list[float]:
    """Return a number of each shard, by its number; all shards call this.

    Args:
        rendezvous: see `Parallelize`; None for one shard.
        name: what it is; the same on all shards.
        value: this shard's number.
        timeout_sec: longest time to wait for the other shards.

    Raises:
        CollectiveError: a shard does not come in time, or is lost.
    """
    if rendezvous is None or not between_hosts(rendezvous):
        return [value]
    world = CommonWorld(
        current().get(str(rendezvous["kv_handler"])).value,
        f"exchange {name}",
        rank=rendezvous["shard_id"],
        size=rendezvous["num_shards"],
        timeout_s=timeout_sec,
        interface=str(rendezvous.get("interface", "")).partition(",")[0],
    )
    numbers: list[float] = world.all_gather([torch.tensor([value], dtype=torch.float64)]).tolist()
    return numbers
