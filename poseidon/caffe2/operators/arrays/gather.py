"""Gather and scatter: rows by index, one-hot rows, unique values, sparse and dense forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of, check_count
from poseidon.caffe2.operators.registry import NO_GRADIENT, operator
from poseidon.caffe2.operators.sparse.segments import ids_of


def taken(x: Any, indices: Tensor, axis: int = 0) -> Any:
    """Return entries of x along an axis, in the indices' shape; x if the axis is empty.

    Raises:
        TypeError: the indices are not whole numbers.
        IndexError: an index is not one of the axis.
    """
    if indices.is_floating_point():
        raise TypeError(f"indices must be int32 or int64, not {indices.dtype}")
    if x.shape[axis] == 0:
        return x
    if isinstance(x, np.ndarray):
        return np.take(x, indices.cpu().numpy(), axis)
    axis = axis_of(axis, x.dim())
    chosen = indices.reshape(-1).to(x.device, torch.int64)
    try:
        flat = torch.index_select(x, axis, chosen)
    except (IndexError, RuntimeError) as error:
        wrong = chosen[(chosen < 0) | (chosen >= x.shape[axis])]
        if not wrong.numel():
            raise
        raise IndexError(
            f"the index {wrong[0]} is not one of the axis {axis}, 0 to {x.shape[axis] - 1}"
        ) from error
    return flat.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _wrapped(indices: Tensor, size: int, wrap: bool) -> Tensor:
    return torch.where(indices < 0, indices + size, indices) if wrap else indices


def _matched(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Return the indices as `torch.gather` and `scatter_add` want them for outer dimensions."""
    if indices.shape[:axis] != x.shape[:axis]:
        wanted = ", ".join([*map(str, x.shape[:axis]), "..."])
        raise ValueError(f"the indices have the shape {tuple(indices.shape)}, not ({wanted}) as x")
    inner = x.shape[axis + 1 :]
    spread = indices.long().reshape(*x.shape[:axis], -1, *([1] * len(inner)))
    return spread.expand(*spread.shape[: axis + 1], *inner)


def _gather_rule(maker: GradientMaker) -> None:
    axis = maker.argument("axis", 0)
    if axis:
        inputs = [maker.I(0), maker.I(1), maker.GO(0)]
        maker.op("BatchGatherGradient", inputs, [maker.GI(0)], {"axis": axis}, copy=True)
    elif maker.argument("dense_gradient", 0):
        maker.op("SparseToDense", [maker.I(1), maker.GO(0), maker.I(0)], [maker.GI(0)])
    else:
        maker.sparse(0, maker.I(1), maker.GO(0))


@operator("Gather", gradient=_gather_rule)
def gather(
    x: Any, indices: Tensor, *, axis: int = 0, match_outer: bool = False, wrap_indices: bool = False
) -> Any:
    """Return entries of x along an axis by index.

    Args:
        x: the entries, numbers or strings.
        indices: int32 or int64, of any shape, which takes the place of the axis.
        axis: the dimension that they index.
        match_outer: whether the indices have the dimensions of x before the axis.
        wrap_indices: whether negative indices count from the end.
    """
    axis = axis_of(axis, x.ndim)
    indices = _wrapped(indices, x.shape[axis], wrap_indices)
    if not match_outer:
        return taken(x, indices, axis)
    found = torch.gather(x, axis, _matched(x, indices, axis))
    return found.reshape((*indices.shape, *x.shape[axis + 1 :]))


@operator("BatchGather", gradient="BatchGatherGradient(I0, I1, GO0) -> GI0", expected="N M *, ?")
def batch_gather(x: Any, indices: Tensor, *, match_outer: bool = False) -> Any:
    """Return entries of x along its second dimension by index."""
    return gather(x, indices, axis=1, match_outer=match_outer)


@operator("BatchGatherGradient")
def batch_gather_gradient(
    x: Tensor, indices: Tensor, dy: Tensor, *, axis: int = 1, match_outer: bool = False
) -> Tensor:
    """Return the gradient of `Gather` along an axis, and of `BatchGather`."""
    axis = axis_of(axis, x.dim())
    dx = torch.zeros(x.shape, dtype=dy.dtype, device=dy.device)
    if match_outer:
        spread = _matched(x, indices, axis)
        check_count("the gradient", dy, spread.numel())
        return dx.scatter_add(axis, spread, dy.reshape(spread.shape))
    shape = (*x.shape[:axis], indices.numel(), *x.shape[axis + 1 :])
    check_count("the gradient", dy, math.prod(shape))
    given = dy.reshape(shape)
    return dx.index_add(axis, indices.reshape(-1).to(torch.int64), given)


@operator("GatherRanges", expected="L *, N R 2")
def gather_ranges(x: Any, ranges: Tensor) -> tuple[Any, Tensor]:
    """Return the entries of x in all ranges (start, length), and how many each example has.

    Args:
        x: a vector of numbers or strings.
        ranges: integers of shape (examples, ranges of an example, 2).
    """
    if ranges.is_meta:
        return x, torch.empty(len(ranges), dtype=torch.int32, device="meta")
    starts, lengths = ranges[..., 0].reshape(-1), ranges[..., 1].reshape(-1)
    return taken(x, places(starts, lengths)), ranges[..., 1].sum(1, dtype=torch.int32)


@operator("LengthsGather", expected="L *, N, M")
def lengths_gather(x: Any, lengths: Tensor, indices: Tensor) -> Any:
    """Return the entries of the segments that the indices name, one segment behind the other."""
    starts = lengths.cumsum(0) - lengths
    chosen = indices.long()
    return taken(x, places(starts[chosen], lengths[chosen]))


def places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return all indices of ranges: for each, `start` to `start + length - 1`."""
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(starts.long() - ends + lengths, lengths.long())
    return torch.arange(len(shift), device=lengths.device) + shift


@operator("ScatterAssign", shapes="N *")
def scatter_assign(x: Tensor, indices: Tensor, slices: Tensor) -> Tensor:
    """Write the slices, one for each index, to the rows that the indices name; return x."""
    places, row = indices.reshape(-1).long(), x.shape[1:]
    check_count("the input slices", slices, len(places) * row.numel())
    x[places] = slices.reshape(len(places), *row).to(x.dtype)
    return x


@operator("Scatter")
def scatter(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 1) -> Tensor:
    """Write the updates to x where the indices say along an axis, and return x."""
    return x.scatter_(axis, indices.long(), updates)


@operator("OneHot", gradient=NO_GRADIENT, expected="N, one")
def one_hot(indices: Tensor, size: Tensor) -> Tensor:
    """Return a row of `size` for each index, 1 at the index."""
    wide = torch.arange(int(size.item()), device=indices.device)
    return (indices[:, None] == wide).to(torch.float32)


@operator("SegmentOneHot", gradient=NO_GRADIENT, expected="N, M, one")
def segment_one_hot(lengths: Tensor, indices: Tensor, size: Tensor) -> Tensor:
    """Return a row of `size` for each segment, 1 at the indices of the segment."""
    rows = torch.zeros(len(lengths), int(size.item()), device=indices.device)
    rows[ids_of(lengths), indices.long()] = 1
    return rows


@operator("BatchOneHot", gradient=NO_GRADIENT, shapes="N D, D, M")
def batch_one_hot(x: Any, lengths: Tensor, values: Any) -> Any:
    """Return for each column of x whether it is each of the values of its length."""
    wide = taken(x, ids_of(lengths), 1)
    if isinstance(wide, np.ndarray):
        return torch.from_numpy((wide == values[None, :]).astype(np.uint8))
    return (wide == values[None, :]).to(x.dtype)


@operator("BatchBucketOneHot", shapes="N D, D, M")
def batch_bucket_one_hot(x: Tensor, lengths: Tensor, boundaries: Tensor) -> Tensor:
    """Return for each column of x and each of its intervals whether x is in it, in x's type.

    A value that equals several boundaries is in the middle one of the intervals between them.
    """
    if x.is_meta:
        return x.new_empty(x.shape[0], lengths.shape[0] + boundaries.shape[0])
    parts, begin = [], 0
    for column, length in enumerate(lengths.tolist()):
        limits, values = boundaries[begin : begin + length].contiguous(), x[:, column].contiguous()
        lower, upper = (torch.searchsorted(limits, values, right=right) for right in (False, True))
        bucket = (lower + upper) // 2
        parts.append((bucket[:, None] == torch.arange(length + 1, device=x.device)).to(x.dtype))
        begin += length
    return torch.cat(parts, 1)


@operator("Unique")
def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different values in order, and for each element the place of its value, int32.

    Their number follows from the shape of x for one value at most.
    """
    if x.is_meta and x.numel() <= 1:
        return x.clone(), torch.empty_like(x, dtype=torch.int32)
    values, inverse = torch.unique(x, sorted=True, return_inverse=True)
    return values, inverse.to(torch.int32)


@operator("SparseToDense", gradient="Gather(GO0, I0) -> GI1", expected="?, ?, N *")
def sparse_to_dense(indices: Tensor, values: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor whose rows are sums of the values of their index.

    Args:
        indices: the row of each value, in any shape.
        values: one for each index: their shapes begin with the shape of the indices.
        like: a tensor with the first dimension of the result; by default the largest index's.
    """
    if values.shape[: indices.dim()] != indices.shape:
        wanted = ", ".join([*map(str, indices.shape), "..."])
        raise ValueError(f"the values have the shape {tuple(values.shape)}, expected ({wanted})")
    shape = values.shape[indices.dim() :]
    size = (int(indices.max()) + 1 if indices.numel() else 0) if like is None else like.shape[0]
    dense = values.new_zeros(size, *shape)
    return dense.index_add(0, indices.reshape(-1).long(), values.reshape(-1, *shape))


def _mask_places(
    indices: Tensor, lengths: Tensor | None, mask: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which entries the mask names, and their row and column."""
    wanted = torch.tensor(list(mask), device=indices.device)
    same = indices[:, None] == wanted
    rows = torch.zeros_like(indices, dtype=torch.int64) if lengths is None else ids_of(lengths)
    found = same.any(1)
    return found, rows[found], same.long().argmax(1)[found]


@operator(
    "SparseToDenseMask",
    gradient="SparseToDenseMaskGradient(I0, GO0, I3?) -> GI1",
    expected="I, I *, ?, N",
)
def sparse_to_dense_mask(
    indices: Tensor,
    values: Any,
    default: Any,
    lengths: Tensor | None = None,
    *,
    mask: list[int],
    return_presence_mask: bool = False,
) -> tuple[Any, Tensor]:
    """Return for each example the values of the mask's indices, and which are there.

    Args:
        indices: the indices of all examples, one example behind the other.
        values: one for each index.
        default: the value of indices that an example does not have.
        lengths: how many indices each example has; by default one example, no first dimension.
        mask: the indices that are wanted.
        return_presence_mask: whether there is a second output.
    """
    found, rows, columns = _mask_places(indices, lengths, mask)
    count = 1 if lengths is None else len(lengths)
    present = torch.zeros(count, len(mask), dtype=torch.bool, device=indices.device)
    present[rows, columns] = True
    if isinstance(values, np.ndarray):
        dense = np.full((count, len(mask), *values.shape[1:]), default.reshape(-1)[0], dtype=object)
        dense[rows.numpy(), columns.numpy()] = values[found.numpy()]
    else:
        check_count("the default", default, values.shape[1:].numel())
        ones = [1] * (values.dim() - 1)
        dense = default.reshape(values.shape[1:]).repeat(count, len(mask), *ones)
        dense[rows, columns] = values[found]
    return (dense, present) if lengths is not None else (dense[0], present[0])


@operator("SparseToDenseMaskGradient", expected="I, ?, N")
def sparse_to_dense_mask_gradient(
    indices: Tensor, dy: Tensor, lengths: Tensor | None = None, *, mask: list[int]
) -> Tensor:
    """Return the gradient of the values: the output's for an index in the mask, else 0."""
    found, rows, columns = _mask_places(indices, lengths, mask)
    rest = dy.shape[1:] if lengths is None else dy.shape[2:]
    count = (1 if lengths is None else len(lengths)) * len(mask) * rest.numel()
    check_count("the gradient", dy, count)
    dx = dy.new_zeros(len(indices), *rest)
    dx[found] = dy.reshape(-1, len(mask), *rest)[rows, columns]
    return dx


@operator("Find")
def find(index: Tensor, query: Tensor, *, missing_value: int = -1) -> Tensor:
    """Return the last place of each queried value in an index, or `missing_value`."""
    same = index.reshape(1, -1) == query.reshape(-1, 1)
    last = index.numel() - 1 - same.flip(1).long().argmax(1)
    found = torch.where(same.any(1), last, missing_value)
    return found.reshape(query.shape).to(query.dtype)


@operator("FindDuplicateElements", expected="N")
def find_duplicate_elements(x: Any) -> Tensor:
    """Return the places of all elements that were seen before."""
    seen: set[Any] = set()
    again = []
    for place, item in enumerate(x.tolist()):
        if item in seen:
            again.append(place)
        seen.add(item)
    return torch.tensor(again, dtype=torch.int64)


@operator("BooleanMask", gradient="BooleanMaskGradient(I1, GO0) -> GI0", shapes="N *, N")
def boolean_mask(x: Any, mask: Tensor) -> tuple[Any, Tensor]:
    """Return the rows of x where the mask holds, and their places."""
    found = torch.nonzero(mask).reshape(-1)
    return taken(x, found), found


@operator("BooleanMaskGradient", expected="N, ?")
def boolean_mask_gradient(mask: Tensor, dy: Tensor) -> Tensor:
    dx = dy.new_zeros(len(mask), *dy.shape[1:])
    dx[mask] = dy
    return dx


@operator("BooleanMaskLengths", gradient=NO_GRADIENT, expected="N, M")
def boolean_mask_lengths(lengths: Tensor, mask: Tensor) -> Tensor:
    """Return how many elements of each segment the mask keeps."""
    return torch.zeros_like(lengths).index_add(0, ids_of(lengths), mask.to(lengths.dtype))


@operator("BooleanUnmask", gradient=NO_GRADIENT, expected="N, _, ...")
def boolean_unmask(mask: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    """Return one vector of pairs of masks and values: the first value whose mask holds."""
    pairs = [mask, x, *others]
    made = x.new_zeros(mask.shape)
    for place in range(len(pairs) - 2, -1, -2):
        made[pairs[place]] = pairs[place + 1]
    return made
