"""Operators that order values and count: top values, ranges, sizes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.arrays.fill import NO_SHAPE, Filled
from poseidon.caffe2.operators.input_shapes import axis_of, check_count
from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import Argument, TensorProto
from poseidon.caffe2.runtime.values import torch_type
from poseidon.errors import counted


@operator("Range", gradient=NO_GRADIENT, inputs=(1, 3))
def range_(*limits: Tensor) -> Tensor:
    """Return start, start + step, ... before stop; inputs: stop, or start and stop, or all.

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
    """Return zeros with a value on the diagonal of 2 dimensions, or of all if equal.

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
    """Return different integers in `min` to `max`, inclusive; none that the second input has.

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


@operator("ArgMax")
def arg_max(x: Tensor, *, axis: int = -1, keepdims: bool = True) -> Tensor:
    """Return the index of the largest value along an axis, the first of equal ones."""
    return x.argmax(axis_of(axis, x.dim()), keepdims)


@operator("ArgMin")
def arg_min(x: Tensor, *, axis: int = -1, keepdims: bool = True) -> Tensor:
    """Return the index of the least value along an axis, the first of equal ones."""
    return x.argmin(axis_of(axis, x.dim()), keepdims)


@operator("RowWiseArgMax", gradient=NO_GRADIENT)
def row_wise_arg_max(x: Tensor) -> Tensor:
    """Return the index of the largest value of each row of a matrix, shape (rows, 1)."""
    return x.argmax(1, keepdim=True)


def _top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of the last dimension and their indices; 0 and -1 if fewer."""
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    missing = max(k - x.shape[-1], 0)
    return (
        functional.pad(values[..., :k], (0, missing)),
        functional.pad(indices[..., :k], (0, missing), value=-1),
    )


@operator("TopK", gradient="TopKGradient(GO0, O1, I0) -> GI0")
def top_k(
    x: Tensor, count: Tensor | None = None, *, k: int | None = None, axis: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest values along an axis, their indices, and the flattened indices.

    The second input gives k, one int64, where the argument does not.

    Raises:
        ValueError: neither gives k, or it is below 1.
    """
    if k is None:
        if count is None:
            raise ValueError("TopK needs the argument k, or a second input")
        check_count("k", count, 1)
        k = int(count)
    if k < 1:
        raise ValueError(f"k is {k}, expected 1 or more")
    axis = axis_of(axis, x.dim())
    size, inner = x.shape[axis], x.shape[axis + 1 :].numel()
    values, indices = _top(x.movedim(axis, -1), k)
    values, indices = values.movedim(-1, axis).contiguous(), indices.movedim(-1, axis).contiguous()
    whole = indices.reshape(x.shape[:axis].numel(), k, inner)
    outer = torch.arange(len(whole), device=x.device)[:, None, None] * size
    flat = (outer + whole) * inner + torch.arange(inner, device=x.device)
    return values, indices, torch.where(whole < 0, -1, flat).reshape(-1)


@operator("TopKGradient", expected="*K, *K")
def top_k_gradient(dy: Tensor, indices: Tensor, x: Tensor, *, axis: int = -1) -> Tensor:
    if x.dim() != dy.dim():
        raise ValueError(f"x has {counted(x.dim(), 'dimension')}, its gradient has {dy.dim()}")
    if not x.numel():
        return torch.zeros_like(x)
    axis, found = axis_of(axis, x.dim()), indices >= 0
    return torch.zeros_like(x).scatter_add(axis, indices.clamp(min=0), torch.where(found, dy, 0))


@operator("LengthsTopK", gradient="LengthsTopKGradient(I1, O1, GO0) -> GI0", expected="N, M")
def lengths_top_k(x: Tensor, lengths: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Return each segment's k largest values and their indices in it; 0 and -1 if fewer."""
    longest = max(int(lengths.max()) if len(lengths) else 0, 1)
    places = torch.arange(longest, device=x.device)
    used = places < lengths[:, None]
    starts = (lengths.cumsum(0) - lengths)[:, None]
    rows = torch.full(used.shape, float("-inf"), dtype=x.dtype, device=x.device)
    rows[used] = x.reshape(-1)[(starts + places)[used]]
    values, indices = _top(rows, k)
    found = torch.arange(k, device=x.device) < lengths[:, None]
    return torch.where(found, values, 0), torch.where(found, indices, -1).to(torch.int32)


@operator("LengthsTopKGradient", expected="M, M K, M K")
def lengths_top_k_gradient(lengths: Tensor, indices: Tensor, dy: Tensor) -> Tensor:
    starts = (lengths.cumsum(0) - lengths)[:, None]
    found = indices >= 0
    dx = torch.zeros(int(lengths.sum()), dtype=dy.dtype, device=dy.device)
    dx[(starts + indices)[found].long()] = dy[found]
    return dx
