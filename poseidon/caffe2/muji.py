"""Sums of blobs over the GPUs of a machine, for scripts that build their replicas themselves.

Law: the blobs are summed in the order of the list on the first GPU and copied to the others, so
all of them have the same bits. `data_parallel_model` overlaps its sums with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.proto import caffe2_pb2


def OnGPU(gpu_id: int) -> caffe2_pb2.DeviceOption:
    """Return the device option of a GPU."""
    return core.DeviceOption(caffe2_pb2.PROTO_CUDA, gpu_id)


def OnCPU() -> caffe2_pb2.DeviceOption:
    """Return the device option of the CPU."""
    return core.DeviceOption(caffe2_pb2.PROTO_CPU)


def Allreduce(
    net: core.Net,
    blobs: Sequence[Any],
    reduced_affix: str = "_reduced",
    gpu_indices: Sequence[int] | None = None,
) -> list[core.BlobReference]:
    """Add operators that give each GPU the sum of blobs.

    Args:
        net: the net.
        blobs: one on each GPU.
        reduced_affix: appended to the name of each blob; the result has its sum.
        gpu_indices: the GPU of each blob; None: 0, 1, ...

    Returns:
        the sums, one on each GPU.

    Raises:
        ValueError: the numbers of blobs and of GPUs differ, or there are no blobs.
    """
    gpus = list(range(len(blobs)) if gpu_indices is None else gpu_indices)
    if len(gpus) != len(blobs) or not blobs:
        raise ValueError(
            f"Allreduce got {len(blobs)} blobs and {len(gpus)} GPUs; expected one blob a GPU"
        )
    names = [str(blob) for blob in blobs]
    with core.DeviceScope(OnGPU(gpus[0])):
        copies = [net.Copy(name, f"{name}_copy_{gpus[0]}") for name in names[1:]]
        total = net.Sum([names[0], *copies], names[0] + reduced_affix)
    sums = [total]
    for name, gpu in zip(names[1:], gpus[1:], strict=True):
        with core.DeviceScope(OnGPU(gpu)):
            sums.append(net.Copy(total, name + reduced_affix))
    return sums
