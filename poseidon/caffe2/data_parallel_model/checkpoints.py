"""What checkpoints and predictors take from a parallelized model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from poseidon.caffe2 import core, predictor_net, workspace
from poseidon.caffe2.data_parallel_model.collectives import between_hosts, sync
from poseidon.caffe2.data_parallel_model.replicas import (
    blobs_to_sync,
    check_parallelized,
    group_of,
    scope_of,
    stripBlobName,
)

COUNTERS = ("Iter", "AtomicIter")


def GetCheckpointParams(model: Any) -> set[Any]:
    """Return the blobs of a complete checkpoint: the first device's, and counters of iterations
    outside scopes.
    """
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
        names = (
            blobs_to_sync(model)[1] if blobs is None else {stripBlobName(blob) for blob in blobs}
        )
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
    """Return the names of the blobs of learning rates: of the optimizer, or of all LearningRate
    operators.
    """
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
    """Return the net of the first device that computes outputs from inputs, and the parameters
    that it reads.

    Args:
        model: a parallelized model for tests.
        inputs, outputs: names without the scope of a device; the net has these too.
        device: the device option of its operators.
    """
    check_parallelized(model)
    first = scope_of(model, model._devices[0])
    plain = [*inputs, *outputs]
    return predictor_net.ExtractPredictorNet(
        net_proto=model.net.Proto(),
        input_blobs=[first + str(name) for name in inputs],
        output_blobs=[first + str(name) for name in outputs],
        device=device,
        renames={first + str(name): str(name) for name in plain},
    )
