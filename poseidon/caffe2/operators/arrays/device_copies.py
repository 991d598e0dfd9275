"""Copies between devices."""

from __future__ import annotations

from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator


@operator("CopyGPUToCPU", gradient="CopyCPUToGPU(GO0) -> GI0")
def copy_gpu_to_cpu(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


@operator("CopyCPUToGPU", gradient="CopyGPUToCPU(GO0) -> GI0")
def copy_cpu_to_gpu(x: Tensor, *, context: Context) -> Tensor:
    """Return a copy on the operator's device."""
    return x.to(context.device, copy=True)


@operator("CopyFromCPUInput")
def copy_from_cpu_input(x: Tensor, *, context: Context) -> Tensor:
    """Return a copy of a tensor of the CPU on the operator's device."""
    return x.to(context.device, copy=True)


@operator("EnsureCPUOutput", gradient=NO_GRADIENT)
def ensure_cpu_output(x: Tensor) -> Tensor:
    """Return a copy on the CPU, wherever the input is."""
    return x.to("cpu", copy=True)
