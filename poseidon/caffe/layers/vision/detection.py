"""Layers of detection nets: Permute and PriorBox of SSD (Liu et al., 2016)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import PriorBoxParameter

Box = tuple[float, float]


@register("Permute")
class Permute(Layer):
    """The bottom's axes in a different order.

    Bottom: any shape. Top: the same values. Fields (permute_param): order; other axes follow in
    their order.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, order = bottoms[0], list(self.param.permute_param.order)
        if len(set(order)) < len(order) or max(order, default=0) >= len(shape):
            raise LayerError(
                f"order is {order}, expected different axes of a bottom of shape {times(shape)}"
            )
        self.order = (*order, *(axis for axis in range(len(shape)) if axis not in order))
        return [tuple(shape[axis] for axis in self.order)]

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.permute(self.order).contiguous()


@register("PriorBox")
class PriorBox(Layer):
    """Boxes of several sizes and shapes around the center of each cell of a feature map.

    Cell (y, x) has its center at ((x + offset) step_w, (y + offset) step_h) in pixels of the image.
    For each min_size m there is a square of side m, one of side sqrt(m M) with the max_size M of
    the same index, and for each aspect ratio a (and 1/a with `flip`) other than 1 a box of m
    sqrt(a) x m / sqrt(a).

    Bottoms: the feature map N x C x H x W; the image N x C x H' x W'. Only their extents are used.
    Top: 1 x 2 x (4 H W boxes): xmin, ymin, xmax, ymax of each box as fractions of the image; then
    the variances. No gradient.

    Fields (prior_box_param): min_size, max_size, aspect_ratio, flip, clip, variance, img_size |
    img_h and img_w, step | step_h and step_w, offset.
    """

    BOTTOMS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.prior_box_param
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if len(shape) != 4:
                raise LayerError(
                    f"bottom '{name}' has shape {times(shape)}, expected 4 axes (NxCxHxW)"
                )
        _check_sizes(param)
        cells, input_size = bottoms[0][2:], bottoms[1][2:]
        image = _pair(param, "img_size", "img_h", "img_w") or (
            float(input_size[0]),
            float(input_size[1]),
        )
        step = _pair(param, "step", "step_h", "step_w") or (
            image[0] / cells[0],
            image[1] / cells[1],
        )
        boxes = self._boxes(param, (cells[0], cells[1]), step, image)
        variances = torch.tensor(_variances(param)).expand(boxes.shape)
        self.top = (
            torch.stack((boxes.flatten(), variances.flatten())).unsqueeze(0).to(self.context.device)
        )
        return [tuple(self.top.shape)]

    def _boxes(
        self, param: PriorBoxParameter, cells: tuple[int, int], step: Box, image: Box
    ) -> Tensor:
        """Return the boxes, H x W x boxes x 4."""
        (high, wide), sides = cells, torch.tensor(list(_sides(param)))
        y = (
            ((torch.arange(high) + param.offset) * step[0])
            .view(-1, 1, 1)
            .expand(high, wide, len(sides))
        )
        x = (
            ((torch.arange(wide) + param.offset) * step[1])
            .view(1, -1, 1)
            .expand(high, wide, len(sides))
        )
        half_w, half_h = sides[:, 0] / 2, sides[:, 1] / 2
        boxes = torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), -1)
        boxes = boxes / torch.tensor((image[1], image[0], image[1], image[0]))
        return boxes.clamp(0, 1) if param.clip else boxes

    def forward(self, feature: Tensor, image: Tensor) -> Tensor:
        return self.top


def _check_sizes(param: PriorBoxParameter) -> None:
    for field, value in param.ListFields():
        if isinstance(value, bool | int):
            continue
        for number in [value] if isinstance(value, float) else value:
            if not math.isfinite(number):
                raise LayerError(f"{field.name} is {number:g}, expected a finite number")
    if not param.min_size or min(param.min_size) <= 0:
        raise LayerError(f"min_size is {list(param.min_size)}, expected one or more positive sizes")
    if param.max_size and len(param.max_size) != len(param.min_size):
        raise LayerError(
            f"max_size occurs {len(param.max_size)} times, expected {len(param.min_size)}"
        )
    for least, most in zip(param.min_size, param.max_size, strict=False):
        if most <= least:
            raise LayerError(f"max_size {most:g} is not larger than min_size {least:g}")
    if len(param.variance) not in (0, 1, 4) or min(param.variance, default=1) <= 0:
        raise LayerError(
            f"variance is {list(param.variance)}, expected one or four positive numbers"
        )


def _ratios(param: PriorBoxParameter) -> list[float]:
    """Return the aspect ratios other than 1 without duplicates, and their inverses with `flip`."""
    ratios = [1.0]
    for ratio in param.aspect_ratio:
        if ratio <= 0:
            raise LayerError(f"aspect_ratio is {ratio:g}, expected a positive number")
        if all(abs(ratio - known) >= 1e-6 for known in ratios):
            ratios += [ratio, 1 / ratio] if param.flip else [ratio]
    return ratios[1:]


def _sides(param: PriorBoxParameter) -> Iterator[Box]:
    """Yield the width and height of each box of a cell, in order."""
    ratios = _ratios(param)
    for index, least in enumerate(param.min_size):
        yield least, least
        if param.max_size:
            side = math.sqrt(least * param.max_size[index])
            yield side, side
        for ratio in ratios:
            yield least * math.sqrt(ratio), least / math.sqrt(ratio)


def _pair(param: PriorBoxParameter, both: str, high: str, wide: str) -> Box | None:
    """Return height and width from one field or from two; None if none is set."""
    sides = [param.HasField(high), param.HasField(wide)]
    if param.HasField(both):
        if any(sides):
            raise LayerError(f"has both {both} and {high}/{wide}, expected one of them")
        pair = (getattr(param, both), getattr(param, both))
    elif any(sides):
        pair = (getattr(param, high), getattr(param, wide))
    else:
        return None
    if min(pair) <= 0:
        raise LayerError(f"{both} is {pair[0]:g} x {pair[1]:g}, expected positive numbers")
    return float(pair[0]), float(pair[1])


def _variances(param: PriorBoxParameter) -> list[float]:
    values = list(param.variance) or [0.1]
    return values * 4 if len(values) == 1 else values
