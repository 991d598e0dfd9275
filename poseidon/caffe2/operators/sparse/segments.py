"""Sums, means and extremes of segments, in all of Caffe2's forms.

A segment is a run of rows: by sorted ids of the rows (`SortedSegment...`), by ids in any order
(`UnsortedSegment...`) or by lengths (`Lengths...`). The `Sparse...` forms first gather rows by
index; their gradients are sparse. `...WeightedSum` has a weight for each row, and with the argument
`grad_on_weights` a gradient for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import operator


def ids_of(lengths: Tensor, rows: int | None = None) -> Tensor:
    """Return the segment of each row for the lengths of all segments.

    Raises:
        ValueError: the lengths do not add up to a number of rows.
    """
    segments = torch.arange(len(lengths), device=lengths.device)
    ids = torch.repeat_interleave(segments, lengths.to(torch.int64))
    if rows is not None and len(ids) != rows:
        raise ValueError(f"the lengths add up to {len(ids)}, expected {rows}, as there are rows")
    return ids


def _count(ids: Tensor, num_segments: int = -1) -> int:
    if num_segments >= 0:
        return num_segments
    return int(ids.max()) + 1 if ids.numel() else 0


def column(values: Tensor, like: Tensor) -> Tensor:
    """Return a value for each row in a shape that broadcasts over the rows of another tensor."""
    return values.reshape([-1, *[1] * like.dim()][: like.dim()])


def _sizes(ids: Tensor, count: int, like: Tensor) -> Tensor:
    """Return the number of rows of each segment, at least 1, as a column."""
    return column(torch.bincount(ids.long(), minlength=count).clamp(min=1).to(like.dtype), like)


def _reduced(kind: str, rows: Tensor, ids: Tensor, count: int) -> Tensor:
    made = rows.new_zeros(count, *rows.shape[1:])
    if kind == "Max":
        spread = column(ids.long(), rows).expand(rows.shape)
        return made.scatter_reduce(0, spread, rows, "amax", include_self=False)
    total = made.index_add(0, ids.long(), rows)
    return total / _sizes(ids, count, rows) if kind == "Mean" else total


def _by_lengths(kind: str, rows: Tensor, lengths: Tensor) -> Tensor:
    if rows.is_meta:
        return rows.new_empty(len(lengths), *rows.shape[1:])
    return _reduced(kind, rows, ids_of(lengths, rows.shape[0]), len(lengths))


def _spread(kind: str, dy: Tensor, ids: Tensor) -> Tensor:
    """Return the gradient of each row of segments that are summed or averaged."""
    return (dy / _sizes(ids, len(dy), dy) if kind == "Mean" else dy)[ids.long()]


def _weights_gradient(dy: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    return (dy[ids.long()] * rows).flatten(1).sum(1) if rows.dim() > 1 else dy[ids.long()] * rows


def _weighted(weights: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
    """Return the gradient of each row of weighted sums."""
    rows = dy[ids.long()]
    return rows * column(weights, rows)


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    return torch.index_select(x, 0, indices.to(torch.int64))


def _register_ids(family: str, kind: str) -> None:
    """Register the forms that have an id for each row."""
    name = f"{family}Segment{kind}Gradient"

    @operator(f"{family}Segment{kind}", gradient=f"{name}(GO0, I1) -> GI0", expected="N *, N")
    def by_ids(x: Tensor, ids: Tensor, *, num_segments: int = -1) -> Tensor:
        return _reduced(kind, x, ids, _count(ids, num_segments))

    sparse = f"{name}(GO0, I2) -> GI0_values; GI0 = (I1, GI0_values)"

    @operator(f"Sparse{family}Segment{kind}", gradient=sparse, expected="N *, I, I")
    def sparse_by_ids(x: Tensor, indices: Tensor, ids: Tensor, *, num_segments: int = -1) -> Tensor:
        return _reduced(kind, _rows(x, indices), ids, _count(ids, num_segments))

    @operator(name, f"Sparse{name}", expected="M *, N")
    def by_ids_gradient(dy: Tensor, ids: Tensor) -> Tensor:
        return _spread(kind, dy, ids)


_WEIGHTED_RULE = (
    "grad_on_weights: @WithMainInputGradient(I1, GO0, I2, I0) -> GI0, GI1"
    " | @Gradient(I1, GO0, I2) -> GI0"
)


def _register_weighted_ids(family: str) -> None:
    name = f"{family}SegmentWeightedSum"

    @operator(name, gradient=_WEIGHTED_RULE, expected="N *, N, N")
    def weighted(x: Tensor, weights: Tensor, ids: Tensor, *, num_segments: int = -1) -> Tensor:
        return _reduced("Sum", x * column(weights, x), ids, _count(ids, num_segments))

    def sparse_rule(maker: GradientMaker) -> None:
        if maker.argument("grad_on_weights", 0):
            raise ValueError(f"Sparse{name} has no gradient of its weights: remove grad_on_weights")
        values = f"{maker.I(0)}_grad_values"
        maker.op(f"{name}Gradient", [maker.I(1), maker.GO(0), maker.I(3)], [values])
        maker.sparse(0, maker.I(2), values)

    @operator(f"Sparse{name}", gradient=sparse_rule, expected="N *, I, I, I")
    def sparse_weighted(
        x: Tensor, weights: Tensor, indices: Tensor, ids: Tensor, *, num_segments: int = -1
    ) -> Tensor:
        rows = _rows(x, indices)
        return _reduced("Sum", rows * column(weights, rows), ids, _count(ids, num_segments))

    @operator(f"{name}Gradient", f"Sparse{name}Gradient", expected="N, M *, N")
    def weighted_gradient(weights: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
        return _weighted(weights, dy, ids)

    @operator(f"{name}WithMainInputGradient", expected="N, M *S, N, N *S")
    def weighted_gradients(
        weights: Tensor, dy: Tensor, ids: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _weighted(weights, dy, ids), _weights_gradient(dy, x, ids)


for _family in ("Sorted", "Unsorted"):
    for _kind in ("Sum", "Mean"):
        _register_ids(_family, _kind)
    _register_weighted_ids(_family)


def _register_range(kind: str) -> None:
    name = f"SortedSegmentRange{kind}"

    @operator(name, gradient=f"{name}Gradient(I0, O0, GO0, I1) -> GI0", expected="N *, N")
    def range_(x: Tensor, ids: Tensor) -> Tensor:
        count = _count(ids)
        if not kind.startswith("Log"):
            return _reduced(kind, x, ids, count)
        most = _reduced("Max", x, ids, count)
        total = _reduced("Sum", torch.exp(x - most[ids.long()]), ids, count)
        if kind == "LogMeanExp":
            total = total / _sizes(ids, count, x)
        return torch.log(total) + most

    @operator(f"{name}Gradient", expected="N *S, M *S, M *S, N")
    def range_gradient(x: Tensor, y: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
        if kind in ("Sum", "Mean"):
            return _spread(kind, dy, ids)
        if kind == "Max":
            return torch.where(x == y[ids.long()], dy[ids.long()], 0)
        share = torch.exp(x - y[ids.long()]) * dy[ids.long()]
        return share / _sizes(ids, len(y), x)[ids.long()] if kind == "LogMeanExp" else share


for _kind in ("Sum", "Mean", "Max", "LogSumExp", "LogMeanExp"):
    _register_range(_kind)


def _register_lengths(kind: str, gradient: str, sparse: str | None) -> None:
    """Register what reduces each segment to one row, 0 for an empty one; its gradients' rules."""

    @operator(f"Lengths{kind}", gradient=gradient, expected="N *, M")
    def by_lengths(x: Tensor, lengths: Tensor) -> Tensor:
        return _by_lengths(kind, x, lengths)

    @operator(f"SparseLengths{kind}", gradient=sparse, expected="N *, I, M")
    def sparse_by_lengths(x: Tensor, indices: Tensor, lengths: Tensor) -> Tensor:
        rows = _rows(x, indices)  # a table of 16-bit floats is added up in 32 bits
        return _by_lengths(kind, rows.float() if rows.dtype == torch.float16 else rows, lengths)


def _register_linear_lengths(kind: str) -> None:
    name = f"LengthsIndicesInGradient{kind}Gradient"
    sparse = f"Sparse{name}(GO0, I2, I1) -> GI0_values; GI0 = (I1, GI0_values)"
    _register_lengths(kind, f"{name}(GO0, I1, I0) -> GI0", sparse)

    # Nets of older releases name the operator without indices.
    @operator(name, f"Sparse{name}", inputs=(3, 3), expected="M *, M, I")
    @operator(
        f"Lengths{kind}Gradient",
        f"SparseLengths{kind}Gradient",
        inputs=(2, 2),
        expected="M *, M",
    )
    def by_lengths_gradient(dy: Tensor, lengths: Tensor, indices: Tensor | None = None) -> Tensor:
        return _spread(kind, dy, ids_of(lengths))


for _kind in ("Sum", "Mean"):
    _register_linear_lengths(_kind)
_register_lengths(
    "Max", "LengthsMaxWithMainInputAndForwardOutputGradient(O0, GO0, I1, I0) -> GI0", None
)


@operator("LengthsMaxWithMainInputAndForwardOutputGradient", expected="M *S, M *S, M, N *S")
def lengths_max_gradient(y: Tensor, dy: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `LengthsMax`: each element that equals the largest has it."""
    ids = ids_of(lengths, x.shape[0])
    return torch.where(x == y[ids], dy[ids], 0)


@operator("LengthsWeightedSum", gradient=_WEIGHTED_RULE, shapes="N *, N, M")
def lengths_weighted_sum(x: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """Return the weighted sum of each segment."""
    return _by_lengths("Sum", x * column(weights, x), lengths)


@operator("LengthsWeightedSumGradient", inputs=(3, 3), expected="N, M *, M")
@operator(
    "SparseLengthsIndicesInGradientWeightedSumGradient", inputs=(4, 4), expected="I, M *, M, I"
)
def lengths_weighted_sum_gradient(
    weights: Tensor, dy: Tensor, lengths: Tensor, indices: Tensor | None = None
) -> Tensor:
    """Return the gradient of the rows of `LengthsWeightedSum`, or of those that were gathered."""
    return _weighted(weights, dy, ids_of(lengths, weights.shape[0]))


@operator("LengthsWeightedSumWithMainInputGradient", inputs=(4, 4), expected="N, M *S, M, N *S")
@operator(
    "SparseLengthsIndicesInGradientWeightedSumWithMainInputGradient",
    inputs=(5, 5),
    expected="I, M *, M, N *, I",
)
def lengths_weighted_sum_gradients(
    weights: Tensor, dy: Tensor, lengths: Tensor, x: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of (gathered) rows and weights of `LengthsWeightedSum`."""
    ids = ids_of(lengths, (x if indices is None else indices).shape[0])
    rows = x if indices is None else _rows(x, indices)
    return _weighted(weights, dy, ids), _weights_gradient(dy, rows, ids)


@operator(
    "SparseLengthsWeightedSum",
    gradient="grad_on_weights: SparseLengthsIndicesInGradientWeightedSumWithMainInputGradient"
    "(I1, GO0, I3, I0, I2) -> GI0_values, GI1; GI0 = (I2, GI0_values)"
    " | SparseLengthsIndicesInGradientWeightedSumGradient"
    "(I1, GO0, I3, I2) -> GI0_values; GI0 = (I2, GI0_values)",
    shapes="N *, I, I, M",
)
def sparse_lengths_weighted_sum(
    x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor
) -> Tensor:
    """Return the weighted sum of the rows that the indices of each segment name."""
    rows = _rows(x, indices)
    return _by_lengths("Sum", rows * column(weights, rows), lengths)


@operator("SparseLengthsPositionalWeightedSum", expected="N *, W, I, M")
def sparse_lengths_positional_weighted_sum(
    x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor
) -> Tensor:
    """Return the sum of each segment's rows, weighted by their place in it."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(indices), device=indices.device) - starts[ids_of(lengths)]
    rows = _rows(x, indices)
    return _by_lengths("Sum", rows * column(weights[place], rows), lengths)
