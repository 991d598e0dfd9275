"""Operators that join, split and mask arrays, and ranges of dense features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.arrays.gather import taken
from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.errors import counted


def _place(axis: int | None, order: str, dimensions: int, add_axis: bool = False) -> int:
    """Return where to join or cut: `axis`, or by default the channels of an order."""
    if axis is None:
        axis = order.index("C")
    return axis_of(axis, dimensions + add_axis)


def _joined(xs: Sequence[Any], place: int, add_axis: bool) -> Any:
    try:
        if isinstance(xs[0], np.ndarray):
            return np.stack(xs, place) if add_axis else np.concatenate(xs, place)
        return torch.stack(list(xs), place) if add_axis else torch.cat(list(xs), place)
    except (IndexError, RuntimeError, ValueError) as error:
        if (
            len({x.ndim for x in xs}) > 1
            or len({_others(x.shape, place, add_axis) for x in xs}) > 1
        ):
            where = "" if add_axis else f" but for the axis {place}"
            raise ValueError(f"inputs have different shapes, expected the same{where}") from error
        raise


def _others(shape: Sequence[int], place: int, add_axis: bool) -> tuple[int, ...]:
    """Return the sizes that all inputs must share."""
    return tuple(shape) if add_axis else (*shape[:place], *shape[place + 1 :])


def _concat_rule(maker: GradientMaker) -> None:
    if maker.given[0] is None:  # only the sizes have a gradient, which goes nowhere
        return
    gradients = [maker.GI(index) for index in range(len(maker.forward.input))]
    maker.op("Split", [maker.GO(0), maker.O(1)], gradients)


@operator("Concat", "DepthConcat", gradient=_concat_rule)
def concat(
    x: Any, *others: Any, axis: int | None = None, order: str = "NCHW", add_axis: bool = False
) -> tuple[Any, Tensor]:
    """Return the inputs joined along an axis, by default the channels, and their sizes there."""
    xs = [x, *others]
    place = _place(axis, order, x.ndim, add_axis)
    device = x.device if isinstance(x, Tensor) and x.device.type == "meta" else None
    joined = _joined(xs, place, add_axis)
    sizes = [1 if add_axis else part.shape[place] for part in xs]
    return joined, torch.tensor(sizes, dtype=torch.int32, device=device)


def _split_rule(maker: GradientMaker) -> None:
    given = [maker.GO(index) for index, gradient in enumerate(maker.given) if gradient is not None]
    if given:
        dx = maker.GI(0)
        maker.op("Concat", given, [dx, f"_{dx}_dims"])


@operator("Split", "DepthSplit", gradient=_split_rule, outputs=(1, ANY), expected="?, M")
def split(
    x: Any,
    sizes: Tensor | None = None,
    *,
    context: Context,
    axis: int | None = None,
    split: list[int] = [],  # noqa: B006 (it is not changed)
    order: str = "NCHW",
    add_axis: bool = False,
) -> tuple[Any, ...]:
    """Return parts of x along an axis, by default the channels: of given sizes, or equal ones.

    Raises:
        ValueError: the sizes do not add up, or equal parts are not possible.
    """
    place, count = _place(axis, order, x.ndim), context.outputs
    total = x.shape[place]
    if sizes is not None:
        split = sizes.tolist()  # shapes do not follow without the data
    if not split:
        if total % count:
            raise ValueError(f"{total} values cannot be split into {count} equal parts")
        split = [total // count] * count
    if len(split) != count or sum(split) != total:
        raise ValueError(f"{total} values cannot be split into {count} parts of sizes {split}")
    parts = (
        np.split(x, np.cumsum(split)[:-1], place)
        if isinstance(x, np.ndarray)
        else x.split(split, place)
    )
    if add_axis:
        return tuple(part.squeeze(place) for part in parts)
    return tuple(p.copy() if isinstance(p, np.ndarray) else p.contiguous() for p in parts)


@operator("SplitByLengths", gradient=_split_rule, expected="?, M")
def split_by_lengths(
    x: Any,
    lengths: Tensor,
    *,
    context: Context,
    axis: int | None = None,
    order: str = "NCHW",
    use_scaling_lengths: bool = False,
) -> tuple[Any, ...]:
    """Return x cut along an axis, by default the channels, into equally many of the lengths.

    With `use_scaling_lengths` the lengths are shares: they are scaled to fill the axis.

    Raises:
        ValueError: the lengths do not fit the outputs or the axis.
    """
    place, count, values = _place(axis, order, x.ndim), context.outputs, lengths.tolist()
    total = x.shape[place]
    if len(values) % count:
        raise ValueError(f"{len(values)} lengths cannot be dealt to {count} outputs")
    if use_scaling_lengths and sum(values):
        values = [value * (total // sum(values)) for value in values]
    if sum(values) != total:
        raise ValueError(f"the lengths add up to {sum(values)}, the axis {place} has {total}")
    each = len(values) // count
    sizes = [sum(values[part * each : (part + 1) * each]) for part in range(count)]
    if isinstance(x, np.ndarray):
        return tuple(part.copy() for part in np.split(x, np.cumsum(sizes)[:-1], place))
    return tuple(part.contiguous() for part in x.split(sizes, place))


@operator("UnsafeCoalesce", inputs=(1, ANY))
def unsafe_coalesce(*xs: Tensor) -> tuple[Tensor, ...]:
    """Return all inputs as views of one buffer, and the buffer: feeding it changes them.

    Raises:
        ValueError: the inputs have different types.
    """
    if len({x.dtype for x in xs}) != 1:
        raise ValueError("UnsafeCoalesce needs inputs of one type")
    buffer = torch.cat([x.reshape(-1) for x in xs])
    buffer.is_shared_buffer = True  # type: ignore[attr-defined]  # FeedBlob writes into it
    parts = buffer.split([x.numel() for x in xs])
    return (*[part.reshape(x.shape) for part, x in zip(parts, xs, strict=True)], buffer)


def _mask_rule(maker: GradientMaker) -> None:
    rest = maker.forward.input[1:]
    made = maker.op("SequenceMask", [maker.GO(0), *rest], [maker.GI(0)])
    made.arg.add(name="grad", i=1)


def _masked(mode: str, row: Tensor, column: Tensor, given: Tensor | None, radius: int) -> Tensor:
    """Return which places are masked, from the row and the column of each."""
    if mode == "sequence" and given is not None:
        return column >= given[row]
    if mode == "window" and given is not None:
        return (column - given[row]).abs() > radius
    compare: dict[str, Any] = {
        "upper": torch.gt,
        "lower": torch.lt,
        "upperdiag": torch.ge,
        "lowerdiag": torch.le,
    }
    if mode not in compare:
        wanted = "sequence and window (with a second input), upper, lower, upperdiag, lowerdiag"
        raise ValueError(f"SequenceMask has no mode {mode!r} for these inputs, only {wanted}")
    result: Tensor = compare[mode](column, row)
    return result


@operator("SequenceMask", gradient=_mask_rule)
def sequence_mask(
    x: Tensor,
    given: Tensor | None = None,
    *,
    mode: str,
    axis: int = 1,
    radius: int = 10,
    grad: bool = False,
    fill_val: float = float("-inf"),
    batch: int | None = None,
    repeat_from_axis: int | None = None,
) -> Tensor:
    """Return x with some values replaced by `fill_val` (by 0 in a gradient).

    x is taken as a matrix: the dimensions before `axis` are rows, the others columns.

    Args:
        x: numbers.
        given: lengths of the rows (mode sequence) or the middle of their windows (mode window).
        mode: `sequence` masks the columns from the row's length on; `window` those more than
            `radius` from the middle; `upper`, `lower` those on one side of the diagonal;
            `upperdiag`, `lowerdiag` the diagonal too.
        axis: the first dimension of the columns.
        radius: see mode.
        grad: whether this is the gradient.
        fill_val: the value of masked places.
        batch: the last dimension that counts batches, each a matrix of its own.
        repeat_from_axis: the first dimension behind the columns: all its values are masked or none.

    Raises:
        ValueError: there is no such mode.
    """
    dims = x.shape
    axis = axis_of(axis, x.dim())
    begin = 0 if batch is None else axis_of(batch, x.dim()) + 1
    end = x.dim() if repeat_from_axis is None else axis_of(repeat_from_axis, x.dim())
    rows, columns = dims[begin:axis].numel(), dims[axis:end].numel()
    row = torch.arange(rows, device=x.device)[:, None]
    column = torch.arange(columns, device=x.device)
    if given is not None and given.numel() < rows:
        raise ValueError(f"the second input has {counted(given.numel(), 'value')}, expected {rows}")
    mask = _masked(mode, row, column, None if given is None else given.reshape(-1), radius)
    mask = mask.reshape(dims[begin:end] + (1,) * (x.dim() - end))
    return x.masked_fill(mask, 0.0 if grad else fill_val)


@operator("GatherRangesToDense", gradient=NO_GRADIENT, inputs=(2, 3), expected="L, N R 2, L")
class GatherRangesToDense:
    """A matrix for each range of an example: rows of its length, 0 where it is empty or differs.

    It counts the empty ranges and those of a different length over all runs, and limits them.

    Args:
        lengths: the width of each output.
        min_observation: the ranges of an output below which a share is taken of this number.
        max_mismatched_ratio, max_empty_ratio: the largest shares of such ranges; from 1 on any.
    """

    def __init__(
        self,
        *,
        lengths: list[int],
        min_observation: int = 10000,
        max_mismatched_ratio: float = 1.0,
        max_empty_ratio: float = 1.0,
    ) -> None:
        self.lengths = lengths
        self.min_observation = min_observation
        self.limits = {"of a different length": max_mismatched_ratio, "empty": max_empty_ratio}
        self.seen = 0
        self.found = {kind: np.zeros(len(lengths), np.int64) for kind in self.limits}

    def __call__(self, x: Any, ranges: Tensor, key: Tensor | None = None) -> tuple[Any, ...]:
        """Return the matrices.

        Args:
            x: a vector.
            ranges: (start, length), shape (examples, ranges, 2); a length is the argument's, or 0.
            key: numbers by which the entries of a range are sorted.

        Raises:
            ValueError: `ranges` is not one a column, or too many are empty or of different length.
        """
        if ranges.shape[1] != len(self.lengths):
            raise ValueError(f"{ranges.shape[1]} ranges are given for {len(self.lengths)} outputs")
        if not ranges.is_meta:
            self._count(ranges)
        places = range(len(self.lengths))
        return tuple(_dense(x, ranges[:, place], key, self.lengths[place]) for place in places)

    def _count(self, ranges: Tensor) -> None:
        sizes = ranges[..., 1].cpu().numpy()
        self.seen += len(sizes)
        self.found["empty"] += (sizes == 0).sum(0)
        odd = (sizes != 0) & (sizes != np.array(self.lengths))
        self.found["of a different length"] += odd.sum(0)
        for kind, limit in self.limits.items():
            allowed = max(self.seen, self.min_observation) * limit
            for place in np.flatnonzero(self.found[kind] > allowed) if limit < 1 else ():
                raise ValueError(
                    f"{self.found[kind][place]} of {self.seen} ranges of the output {place} are "
                    f"{kind}; at most {allowed:g} are allowed"
                )


def _dense(x: Any, ranges: Tensor, key: Tensor | None, width: int) -> Any:
    """Return the matrix of one output."""
    whole = ranges[:, 1] == width
    if len(x) == 0:
        return (
            x.new_zeros(len(ranges), width)
            if isinstance(x, Tensor)
            else np.full((len(ranges), width), b"", object)
        )
    starts = torch.where(whole, ranges[:, 0].long(), 0)[:, None]
    rows = starts + torch.arange(width, device=ranges.device)
    rows = rows.clamp(max=len(x) - 1)
    if key is not None:
        rows = rows.gather(1, key[rows].argsort(dim=1, stable=True))
    found = taken(x, rows)
    if isinstance(found, np.ndarray):
        found[~whole.cpu().numpy()] = b""
        return found
    return torch.where(whole[:, None], found, 0)
