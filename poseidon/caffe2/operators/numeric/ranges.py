"""Fillers of ranges, diagonals and distinct values, and of 16-bit numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.arrays.fill import NO_SHAPE, Filled
from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.data_types import torch_type


@operator("Range", gradient=NO_GRADIENT, inputs=(1, 3))
def range_(*limits: Tensor) -> Tensor:
    """Return start, start + step, ... before stop; the inputs are stop, or start and stop, or
    all three.

    Raises:
        ValueError: the step is 0.
    """
    values = [limit.item() for limit in limits]
    start, stop, step = (
        [*values, 1] if len(values) == 2 else values if len(values) == 3 else [0, *values, 1]
    )
    if step == 0:
        raise ValueError("Step size cannot be 0: a range would never end")
    count = max(int(np.ceil((stop - start) / step)), 0)
    made = start + step * torch.arange(count, device=limits[0].device, dtype=limits[0].dtype)
    return made.to(limits[0].dtype)


@operator("RangeFill", gradient=NO_GRADIENT)
def range_fill(*inputs: Tensor, context: Context, filled: Filled = NO_SHAPE) -> Tensor:
    """Return 0, 1, 2, ... in a shape."""
    size = filled.sizes(inputs, context)
    count = int(np.prod(size, dtype=np.int64))
    return torch.arange(count, dtype=torch.float32, device=context.device).reshape(size)


@operator("DiagonalFill", gradient=NO_GRADIENT)
def diagonal_fill(
    *inputs: Tensor,
    context: Context,
    filled: Filled = NO_SHAPE,
    dtype: int = TensorProto.FLOAT,
    value: Argument | None = None,
) -> Tensor:
    """Return zeros with a value on the diagonal of the first two dimensions, or of all where
    these are equal.

    Raises:
        ValueError: the shape has fewer than two dimensions, or more and not all equal.
    """
    size = filled.sizes(inputs, context)
    if len(size) < 2 or (len(size) > 2 and len(set(size)) > 1):
        raise ValueError(f"a tensor of shape {size} has no diagonal")
    number = 0 if value is None else value.f if value.HasField("f") else value.i
    made = torch.zeros(size, dtype=torch_type(dtype), device=context.device)
    place = torch.arange(min(size), device=context.device)
    made[(place,) * len(size)] = number
    return made


@operator("UniqueUniformFill", gradient=NO_GRADIENT)
def unique_uniform_fill(
    *inputs: Tensor,
    context: Context,
    filled: Filled = NO_SHAPE,
    dtype: int = TensorProto.INT32,
    min_: int = 0,
    max_: int = 1,
) -> Tensor:
    """Return different integers between `min` and `max`, both included; none that the second
    input has.

    Raises:
        ValueError: there are not enough.
    """
    size = filled.sizes(inputs[:1], context)
    count = int(np.prod(size, dtype=np.int64))
    choice = torch.arange(min_, max_ + 1)
    if len(inputs) == 2:
        choice = choice[~torch.isin(choice, inputs[1].cpu().to(choice.dtype))]
    if count > len(choice):
        raise ValueError(f"{count} different values are asked for, there are {len(choice)}")
    generator = context.generator if context.device.type == "cpu" else None
    order = torch.randperm(len(choice), generator=generator)[:count]
    return choice[order].reshape(size).to(context.device, torch_type(dtype))


@operator("Float16ConstantFill", gradient=NO_GRADIENT)
def float16_constant_fill(*, context: Context, shape: list[int], value: float = 0.0) -> Tensor:
    """Return 16-bit numbers of one value."""
    return torch.full(shape, value, dtype=torch.float16, device=context.device)


@operator("Float16UniformFill", gradient=NO_GRADIENT)
def float16_uniform_fill(
    *, context: Context, shape: list[int], min_: float = 0.0, max_: float = 1.0
) -> Tensor:
    """Return 16-bit numbers uniform between `min` and `max`."""
    made = torch.empty(shape, device=context.device)
    return made.uniform_(min_, max_, generator=context.generator).to(torch.float16)
