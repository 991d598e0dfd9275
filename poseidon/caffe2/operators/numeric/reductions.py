"""Reductions over axes, over leading or trailing dimensions, and over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poseidon.caffe2.operators.input_shapes import axis_of, check_count, check_tensor
from poseidon.caffe2.operators.registry import operator
from poseidon.errors import counted


def _axes(x: Tensor, axes: Sequence[int]) -> list[int]:
    return [axis_of(axis, x.dim()) for axis in axes] if axes else list(range(x.dim()))


def _kept(y: Tensor, x: Tensor, axes: Sequence[int]) -> Tensor:
    """Return a result of the axes as if their dimensions were kept: with 1 for each."""
    reduced = _axes(x, axes)
    shape = [1 if axis in reduced else size for axis, size in enumerate(x.shape)]
    check_count("the gradient, or the result,", y, math.prod(shape))
    return y.reshape(shape)


def _mean(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    if not x.numel():
        return _sum(x, axes, keepdim)
    if x.is_floating_point():
        return x.mean(axes, keepdim)
    count = x.numel() // x.sum(axes).numel()
    return torch.div(x.sum(axes, keepdim), count, rounding_mode="trunc").to(x.dtype)


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    return x.sum(axes, keepdim, dtype=x.dtype)


def _reduction(name: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    @operator(name, gradient=f"{name}Gradient(GO0, I0, O0) -> GI0")
    def reduce(x: Tensor, *, axes: list[int] = [], keepdims: bool = True) -> Tensor:  # noqa: B006
        if x.dim() == 0:
            return function(x.reshape(1), [0], False)
        return function(x, _axes(x, axes), keepdims)


for _name, _function in {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMin": lambda x, axes, keepdim: x.amin(axes, keepdim),
    "ReduceMax": lambda x, axes, keepdim: x.amax(axes, keepdim),
    "ReduceL1": lambda x, axes, keepdim: x.abs().sum(axes, keepdim, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keepdim: x.square().sum(axes, keepdim).sqrt(),
}.items():
    _reduction(_name, _function)


@operator("ReduceSumGradient", expected="*Y, ?, *Y")
def reduce_sum_gradient(dy: Tensor, x: Tensor, y: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    return _kept(dy, x, axes).expand(x.shape).clone()


@operator("ReduceMeanGradient", expected="*Y, ?, *Y")
def reduce_mean_gradient(dy: Tensor, x: Tensor, y: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    return (_kept(dy, x, axes) * (y.numel() / max(x.numel(), 1))).expand(x.shape).clone()


@operator("ReduceMinGradient", "ReduceMaxGradient", expected="*Y, ?, *Y")
def reduce_extreme_gradient(dy: Tensor, x: Tensor, y: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    """Return the gradient of `ReduceMin` or `ReduceMax`: all that equal the result have it."""
    return torch.where(x == _kept(y, x, axes), _kept(dy, x, axes), 0)


@operator("ReduceL1Gradient", expected="*Y, ?, *Y")
def reduce_l1_gradient(dy: Tensor, x: Tensor, y: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    return _kept(dy, x, axes) * torch.sign(x)


@operator("ReduceL2Gradient", expected="*Y, ?, *Y")
def reduce_l2_gradient(dy: Tensor, x: Tensor, y: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006
    """Return the gradient of `ReduceL2`; 0 where the norm is 0."""
    norm = _kept(y, x, axes)
    return torch.where(norm == 0, 0, _kept(dy, x, axes) * x / norm)


def _matrix(x: Tensor, count: int, front: bool) -> Tensor:
    """Return x as a matrix whose first dimension is the one that is reduced."""
    if not 0 <= count <= x.dim():
        raise ValueError(f"{counted(x.dim(), 'dimension')} cannot be reduced by {count}")
    split = count if front else x.dim() - count
    rows = x.reshape(x.shape[:split].numel(), x.shape[split:].numel())
    return rows if front else rows.t()


def _used(rows: Tensor, lengths: Tensor | None) -> Tensor:
    """Return which elements of a matrix count: in each column the first `length` ones."""
    if lengths is None:
        return torch.ones_like(rows, dtype=torch.bool)
    check_tensor("the input lengths", lengths, (rows.shape[1],))
    return torch.arange(len(rows), device=rows.device)[:, None] < lengths[None, :]


def _counts(rows: Tensor, lengths: Tensor | None) -> Tensor | int:
    return max(len(rows), 1) if lengths is None else lengths.clamp(min=1).to(rows.dtype)


def _sizes(x: Tensor) -> torch.Size:
    """Return a gradient's input's shape: its own, or the one in a vector of int64."""
    return torch.Size(x.tolist()) if x.dtype == torch.int64 and x.dim() == 1 else x.shape


def _side(front: bool) -> None:
    side = "Front" if front else "Back"

    def shape(x: Tensor, count: int) -> torch.Size:
        return x.shape[count:] if front else x.shape[: x.dim() - count]

    def back(rows: Tensor, x: Tensor) -> Tensor:
        return (rows if front else rows.t()).reshape(x.shape)

    def register_linear(kind: str) -> None:
        mean = kind == "Mean"

        @operator(
            f"Reduce{side}{kind}", gradient=f"Reduce{side}{kind}Gradient(GO0, I0, I1?) -> GI0"
        )
        def reduce(x: Tensor, lengths: Tensor | None = None, *, num_reduce_dim: int = 1) -> Tensor:
            rows = _matrix(x, num_reduce_dim, front)
            total = rows if lengths is None else torch.where(_used(rows, lengths), rows, 0)
            made = total.sum(0) / _counts(rows, lengths) if mean else total.sum(0, dtype=x.dtype)
            return made.reshape(shape(x, num_reduce_dim))

        @operator(f"Reduce{side}{kind}Gradient")
        def reduce_gradient(
            dy: Tensor, x: Tensor, lengths: Tensor | None = None, *, num_reduce_dim: int = 1
        ) -> Tensor:
            x = dy.new_empty(_sizes(x))
            rows = _matrix(x, num_reduce_dim, front)
            check_count("the gradient", dy, rows.shape[1])
            share = dy.reshape(-1) / _counts(rows, lengths) if mean else dy
            return back(torch.where(_used(rows, lengths), share.reshape(1, -1), 0), x)

    register_linear("Sum")
    register_linear("Mean")

    @operator(f"Reduce{side}Max", gradient=f"Reduce{side}MaxGradient(GO0, I0, O0, I1?) -> GI0")
    def reduce_max(x: Tensor, lengths: Tensor | None = None, *, num_reduce_dim: int = 1) -> Tensor:
        rows = _matrix(x, num_reduce_dim, front)
        if lengths is not None:
            rows = torch.where(_used(rows, lengths), rows, rows.new_full((), float("-inf")))
        return rows.amax(0).reshape(shape(x, num_reduce_dim))

    @operator(f"Reduce{side}MaxGradient")
    def reduce_max_gradient(
        dy: Tensor, x: Tensor, y: Tensor, lengths: Tensor | None = None, *, num_reduce_dim: int = 1
    ) -> Tensor:
        rows = _matrix(x, num_reduce_dim, front)
        for name, value in (("the result", y), ("the gradient", dy)):
            check_count(name, value, rows.shape[1])
        chosen = _used(rows, lengths) & (rows == y.reshape(1, -1))
        return back(torch.where(chosen, dy.reshape(1, -1), 0), x)


_side(front=True)
_side(front=False)


def _register_max(kind: str, axis: int, result: str, *names: str) -> None:
    """Register the largest of an axis of each matrix of a batch; its gradient has more names."""

    @operator(f"{kind}Max", gradient=f"{kind}MaxGradient(I0, O0, GO0) -> GI0", expected="N R C")
    def largest(x: Tensor) -> Tensor:
        return x.amax(axis)

    @operator(f"{kind}MaxGradient", *names, expected=f"N R C, {result}, {result}")
    def largest_gradient(x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
        return torch.where(x == y.unsqueeze(axis), dy.unsqueeze(axis), 0)


_register_max("Colwise", 1, "N C", "ColumnMaxGradient")
_register_max("Rowwise", 2, "N R")


@operator("SumElements", gradient="SumElementsGradient(I0, GO0) -> GI0")
def sum_elements(x: Tensor, *, average: bool = False) -> Tensor:
    """Return the sum, or the mean, of all elements, a scalar."""
    return x.sum() / max(x.numel(), 1) if average else x.sum()


@operator("SumElementsInt")
def sum_elements_int(x: Tensor) -> Tensor:
    """Return the sum of all elements of a tensor of integers, a scalar."""
    return x.sum(dtype=x.dtype)


@operator("SumElementsGradient")
def sum_elements_gradient(x: Tensor, dy: Tensor, *, average: bool = False) -> Tensor:
    share = dy / max(x.numel(), 1) if average else dy
    return share.reshape(()).expand(x.shape).clone()


@operator("SumSqrElements")
def sum_sqr_elements(x: Tensor, *, average: bool = False) -> Tensor:
    """Return the sum, or the mean, of the squares of all elements, a scalar."""
    total = x.square().sum()
    return total / max(x.numel(), 1) if average else total


@operator("LpNorm", gradient="LpNormGradient(I0, GO0) -> GI0")
def lp_norm(x: Tensor, *, p: int = 2, average: bool = False) -> Tensor:
    """Return the sum of |x| (p = 1) or of x^2 (p = 2, no root is taken), shape (1,).

    Raises:
        ValueError: p is neither.
    """
    if p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, not {p}")
    total = (x.abs() if p == 1 else x.square()).sum().reshape(1)
    return total / max(x.numel(), 1) if average else total


@operator("LpNormGradient")
def lp_norm_gradient(x: Tensor, dy: Tensor, *, p: int = 2, average: bool = False) -> Tensor:
    slope = torch.sign(x) if p == 1 else 2 * x
    return slope * (dy.reshape(()) / max(x.numel(), 1) if average else dy.reshape(()))


@operator("Moments", gradient="MomentsGradient(GO0, GO1, I0, O0) -> GI0")
def moments(x: Tensor, *, axes: list[int] = [], keepdims: bool = True) -> tuple[Tensor, Tensor]:  # noqa: B006
    """Return mean and biased variance over the axes, by default over all."""
    reduced = _axes(x, axes)
    return x.mean(reduced, keepdims), x.var(reduced, correction=0, keepdim=keepdims)


@operator("MomentsGradient", expected="*M, *M, ?, *M")
def moments_gradient(
    dmean: Tensor,
    dvariance: Tensor,
    x: Tensor,
    mean: Tensor,
    *,
    axes: list[int] = [],  # noqa: B006
) -> Tensor:
    share = mean.numel() / max(x.numel(), 1)
    dmean, dvariance, mean = (_kept(value, x, axes) for value in (dmean, dvariance, mean))
    return (dmean + 2 * (x - mean) * dvariance) * share
