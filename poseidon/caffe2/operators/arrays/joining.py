"""Concat and Split in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import Context, operator


def _place(axis: int | None, order: str, dimensions: int, add_axis: bool = False) -> int:
    """Return where to join or cut: `axis`, or by default the channels of an order."""
    if axis is None:
        axis = order.index("C")
    return axis % (dimensions + add_axis)


def _joined(xs: Sequence[Any], place: int, add_axis: bool) -> Any:
    if isinstance(xs[0], np.ndarray):
        return np.stack(xs, place) if add_axis else np.concatenate(xs, place)
    return torch.stack(list(xs), place) if add_axis else torch.cat(list(xs), place)


def _concat_rule(maker: GradientMaker) -> None:
    gradients = [maker.GI(index) for index in range(len(maker.forward.input))]
    maker.op("Split", [maker.GO(0), maker.O(1)], gradients)


@operator("Concat", "DepthConcat", gradient=_concat_rule)
def concat(
    x: Any, *others: Any, axis: int | None = None, order: str = "NCHW", add_axis: bool = False
) -> tuple[Any, Tensor]:
    """Return the inputs joined along an axis, by default the channels, and the size of each there."""
    xs = [x, *others]
    place = _place(axis, order, x.ndim, add_axis)
    device = x.device if isinstance(x, Tensor) and x.device.type == "meta" else None
    sizes = [1 if add_axis else part.shape[place] for part in xs]
    return _joined(xs, place, add_axis), torch.tensor(sizes, dtype=torch.int32, device=device)


def _split_rule(maker: GradientMaker) -> None:
    given = [maker.GO(index) for index, gradient in enumerate(maker.given) if gradient is not None]
    if given:
        dx = maker.GI(0)
        maker.op("Concat", given, [dx, f"_{dx}_dims"])


@operator("Split", "DepthSplit", gradient=_split_rule, outputs=(1, 1 << 30))
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
    if sizes is not None and sizes.device.type != "meta":
        split = sizes.tolist()
    if not split:
        if total % count:
            raise ValueError(f"{total} values cannot be split into {count} equal parts")
        split = [total // count] * count
    if len(split) != count or sum(split) != total:
        raise ValueError(f"{total} values cannot be split into {count} parts of sizes {split}")
    parts = np.split(x, np.cumsum(split)[:-1], place) if isinstance(x, np.ndarray) else x.split(split, place)
    if add_axis:
        return tuple(part.squeeze(place) for part in parts)
    return tuple(part.copy() if isinstance(part, np.ndarray) else part.contiguous() for part in parts)
