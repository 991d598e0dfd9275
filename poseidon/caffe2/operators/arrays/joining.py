"""Concat and Split in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of
from poseidon.caffe2.operators.registry import Context, operator


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
            raise ValueError(
                f"the inputs have different shapes, expected the same{where}"
            ) from error
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
    """Return the inputs joined along an axis, by default the channels, and the size of each
    there.
    """
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


@operator("Split", "DepthSplit", gradient=_split_rule, outputs=(1, 1 << 30), expected="?, M")
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
    return tuple(
        part.copy() if isinstance(part, np.ndarray) else part.contiguous() for part in parts
    )


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
    """Return x cut along an axis, by default the channels, so that each output has equally many
    of the lengths.

    With `use_scaling_lengths` the lengths are shares: they are multiplied so that they fill the
    axis.

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


@operator("UnsafeCoalesce", inputs=(1, 1 << 30))
def unsafe_coalesce(*xs: Tensor) -> tuple[Tensor, ...]:
    """Return all inputs as views of one buffer, and the buffer: feeding a buffer of this size
    changes them all.

    Raises:
        ValueError: the inputs have different types.
    """
    if len({x.dtype for x in xs}) != 1:
        raise ValueError("UnsafeCoalesce needs inputs of one type")
    buffer = torch.cat([x.reshape(-1) for x in xs])
    buffer.is_shared_buffer = True  # type: ignore[attr-defined]  # FeedBlob writes into it
    parts = buffer.split([x.numel() for x in xs])
    return (*[part.reshape(x.shape) for part, x in zip(parts, xs, strict=True)], buffer)
