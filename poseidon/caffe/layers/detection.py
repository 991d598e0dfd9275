"""Layers of detection nets: Permute and PriorBox of SSD (Liu et al., 2016), the Python layers of
py-faster-rcnn and py-R-FCN, and the anchors of region proposals.

Boxes of region proposal networks (Ren et al., 2015): anchors, coordinates relative to them,
overlaps, suppression.

Law: pure functions. A box is x1, y1, x2, y2 with both corners inside, so its
width is x2 - x1 + 1. All results are float32.

The Python layers of py-faster-rcnn and py-R-FCN as layer types.

A definition that names `rpn.proposal_layer` and its like works without those modules: the layer
types of this program take their place, with the numbers of the reference's configuration. If Python
finds the module, the user's layer runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerContext, LayerError, Shape, check_image, times
from poseidon.caffe.layers.registry import register, replaces_python
from poseidon.caffe.proto.caffe_pb2 import TEST, LayerParameter, PriorBoxParameter

RATIOS = (0.5, 1.0, 2.0)
SCALES = (8.0, 16.0, 32.0)


def base_anchors(size: int, ratios: Sequence[float], scales: Sequence[float]) -> Tensor:
    """Return the anchors of the cell at the origin, ratios x scales boxes.

    Args:
        size: the side of the square that ratios and scales change.
        ratios: height through width, in the order of the boxes.
        scales: factors of both sides, for each ratio.
    """
    center = (size - 1) / 2
    boxes = []
    for ratio in ratios:
        # Rounded half to even, as by numpy.
        wide = float(round(math.sqrt(size * size / ratio)))
        high = float(round(wide * ratio))
        for scale in scales:
            reach_x, reach_y = (wide * scale - 1) / 2, (high * scale - 1) / 2
            boxes.append((center - reach_x, center - reach_y, center + reach_x, center + reach_y))
    return torch.tensor(boxes, dtype=torch.float32)


def anchors_of_map(base: Tensor, high: int, wide: int, stride: int) -> Tensor:
    """Return the anchors of every cell of a map, (high x wide x len(base)) x 4 in the order of
    rows, columns, boxes.
    """
    y, x = torch.meshgrid(
        torch.arange(high, device=base.device) * stride,
        torch.arange(wide, device=base.device) * stride,
        indexing="ij",
    )
    shifts = torch.stack((x, y, x, y), -1).view(-1, 1, 4)
    return (base + shifts).view(-1, 4)


def _centers(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the centers and the sides of boxes, ... x 2 each."""
    sides = boxes[..., 2:] - boxes[..., :2] + 1
    return boxes[..., :2] + 0.5 * sides, sides


def decode(anchors: Tensor, deltas: Tensor) -> Tensor:
    """Return the boxes of relative coordinates dx, dy, log dw, log dh."""
    center, sides = _centers(anchors)
    middle = deltas[..., :2] * sides + center
    reach = 0.5 * deltas[..., 2:].exp() * sides
    return torch.cat((middle - reach, middle + reach), -1)


def encode(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return the coordinates of boxes relative to anchors: dx, dy, log dw, log dh."""
    center, sides = _centers(anchors)
    middle, extents = _centers(boxes)
    return torch.cat(((middle - center) / sides, (extents / sides).log()), -1)


def clip(boxes: Tensor, high: float, wide: float) -> Tensor:
    """Return boxes with their corners inside an image."""
    x = boxes[..., 0::2].clamp(0, max(wide - 1, 0))
    y = boxes[..., 1::2].clamp(0, max(high - 1, 0))
    return torch.stack((x[..., 0], y[..., 0], x[..., 1], y[..., 1]), -1)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each pair of boxes, len(a) x len(b)."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low + 1).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2] + 1).prod(-1) for boxes in (a, b)]
    return common / (areas[0][:, None] + areas[1][None, :] - common)


def suppress(boxes: Tensor, threshold: float, most: int) -> Tensor:
    """Return the indices of the boxes that stay of boxes in the order of falling scores.

    A box stays unless its overlap with one that stays before it exceeds the threshold (non-maximum
    suppression).

    Args:
        boxes: N x 4.
        threshold: the largest overlap.
        most: the maximum number of boxes to return.
    """
    kept: list[int] = []
    left = torch.arange(len(boxes), device=boxes.device)
    while len(left) and len(kept) < most:
        first = left[0]
        kept.append(int(first))
        left = left[1:]
        left = left[overlaps(boxes[first].unsqueeze(0), boxes[left])[0] <= threshold]
    return torch.tensor(kept, dtype=torch.long, device=boxes.device)


# cfg.TRAIN and cfg.TEST of py-faster-rcnn: boxes before and after suppression.
TRAIN_COUNTS, TEST_COUNTS = (12000, 2000), (6000, 300)
AGNOSTIC = 2
_SETTING = re.compile(
    r"""['"]?(\w+)['"]?\s*:\s*(?:!!python/tuple\s*)?(\[[^\]]*\]|\([^)]*\)|[^,\s}]+)"""
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def settings(param: LayerParameter) -> dict[str, list[float]]:
    """Return the numbers of `param_str`, YAML of one level: 'feat_stride': 16.

    Raises:
        LayerError: a value is not a number or a list of numbers.
    """
    found = {}
    for name, value in _SETTING.findall(param.python_param.param_str):
        numbers = _NUMBER.findall(value)
        if not numbers:
            raise LayerError(
                f"param_str sets {name} to '{value}', expected a number or a list of numbers"
            )
        found[name] = [float(number) for number in numbers]
    return found


def _number(given: dict[str, list[float]], name: str) -> int:
    if name not in given:
        raise LayerError(f"param_str has no '{name}', expected '{name}': <number>")
    return round(given[name][0])


def _same(param: LayerParameter, kind: str) -> LayerParameter:
    """Return the definition with a different type and without its python_param."""
    result = deepcopy(param)
    result.type = kind
    result.ClearField("python_param")
    return result


@replaces_python("rpn.proposal_layer", "ProposalLayer")
def proposal(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return a Proposal layer."""
    given, result = settings(param), _same(param, "Proposal")
    result.proposal_param.feat_stride = _number(given, "feat_stride")
    result.proposal_param.scale.extend(given.get("scales", []))
    result.proposal_param.ratio.extend(given.get("ratios", []))
    counts = TEST_COUNTS if context.phase == TEST else TRAIN_COUNTS
    result.proposal_param.pre_nms_topn, result.proposal_param.post_nms_topn = counts
    return result


@replaces_python("rpn.anchor_target_layer", "AnchorTargetLayer")
def anchor_target(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return an AnchorTarget layer."""
    given, result = settings(param), _same(param, "AnchorTarget")
    result.anchor_target_param.feat_stride = _number(given, "feat_stride")
    result.anchor_target_param.scale.extend(given.get("scales", []))
    result.anchor_target_param.ratio.extend(given.get("ratios", []))
    if "allowed_border" in given:
        result.anchor_target_param.allowed_border = given["allowed_border"][0]
    return result


@replaces_python("rpn.proposal_target_layer", "ProposalTargetLayer")
def proposal_target(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Return a ProposalTarget layer.

    Two classes mean py-R-FCN: one set of coordinates for all.
    """
    given, result = settings(param), _same(param, "ProposalTarget")
    count = _number(given, "num_classes")
    result.proposal_target_param.num_classes = count
    result.proposal_target_param.agnostic = count == AGNOSTIC
    return result


@replaces_python("roi_data_layer.layer", "RoIDataLayer")
def roi_data(param: LayerParameter, context: LayerContext) -> LayerParameter:
    """Raise LayerError: the images of this layer come from the program that runs the net."""
    raise LayerError(
        "RoIDataLayer has no file to read: py-faster-rcnn passes its images to it. Write type: "
        '"ROIData" with roi_data_param { '
        "source: ... }, a window file, in its place"
    )


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
            check_image(shape, f"bottom '{name}'")
        _check_sizes(param)
        (high, wide), (rows, columns) = bottoms[1][2:], bottoms[0][2:]
        image = _pair(param, "img_size", "img_h", "img_w") or (float(high), float(wide))
        step = _pair(param, "step", "step_h", "step_w") or (image[0] / rows, image[1] / columns)
        boxes = self._boxes(param, (rows, columns), step, image)
        variances = torch.tensor(_variances(param)).expand(boxes.shape)
        both = torch.stack((boxes.flatten(), variances.flatten()))
        self.top = both.unsqueeze(0).to(self.context.device)
        return [tuple(self.top.shape)]

    def _boxes(
        self, param: PriorBoxParameter, cells: tuple[int, int], step: Box, image: Box
    ) -> Tensor:
        """Return the boxes, H x W x boxes x 4."""
        (high, wide), sides = cells, torch.tensor(list(_sides(param)))
        y = ((torch.arange(high) + param.offset) * step[0]).view(-1, 1, 1)
        x = ((torch.arange(wide) + param.offset) * step[1]).view(1, -1, 1)
        half_w, half_h = sides[:, 0] / 2, sides[:, 1] / 2
        corners = (x - half_w, y - half_h, x + half_w, y + half_h)
        boxes = torch.stack(torch.broadcast_tensors(*corners), -1)
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
