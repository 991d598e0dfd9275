"""Positions of largest and least values: ArgMax, ArgMin, TopK and its form for segments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.input_shapes import axis_of, check_count
from poseidon.caffe2.operators.registry import NO_GRADIENT, operator
from poseidon.errors import counted


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
    """Return the k largest values of the last dimension and their indices; 0 and -1 where there
    are fewer.
    """
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
    """Return the k largest values along an axis, their indices, and their indices in the
    flattened tensor.

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
        raise ValueError(
            f"x has {counted(x.dim(), 'dimension')}, expected {dy.dim()} as the gradient"
        )
    axis, found = axis_of(axis, x.dim()), indices >= 0
    return torch.zeros_like(x).scatter_add(axis, indices.clamp(min=0), torch.where(found, dy, 0))


@operator("LengthsTopK", gradient="LengthsTopKGradient(I1, O1, GO0) -> GI0", expected="N, M")
def lengths_top_k(x: Tensor, lengths: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each segment and their indices in it; 0 and -1 where there
    are fewer.
    """
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
