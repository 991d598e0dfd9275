"""Regions of images: maxima and bilinear means of parts, boxes moved by differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe2.operators.layers.windows import in_nchw, in_order
from poseidon.caffe2.operators.registry import operator

LARGEST_CHANGE = math.log(1000 / 16)
"""The largest logarithm by which a box grows (Detectron's limit)."""


def _boxes(regions: Tensor) -> tuple[Tensor, Tensor]:
    """Return each region's image and corners (x1, y1, x2, y2); by default the first image."""
    if regions.shape[1] == 4:
        return torch.zeros(len(regions), dtype=torch.int64, device=regions.device), regions
    return regions[:, 0].long(), regions[:, 1:]


def _rounded(x: Tensor) -> Tensor:
    """Return values rounded half away from zero, as C does."""
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def _cells(first: Tensor, last: Tensor, parts: int, size: int) -> Tensor:
    """Return which cells of one axis each part of each region has: (regions, parts, size)."""
    step = ((last - first + 1).clamp(min=1) / parts)[:, None]
    place = torch.arange(parts, device=first.device)
    begin = ((place * step).floor() + first[:, None]).clamp(0, size)
    end = (((place + 1) * step).ceil() + first[:, None]).clamp(0, size)
    return _between(begin, end, size)


def _between(begin: Tensor, end: Tensor, size: int) -> Tensor:
    """Return which cells of one axis lie from `begin` to before `end`, in a new last dimension."""
    cell = torch.arange(size, device=begin.device)
    return (cell >= begin[..., None]) & (cell < end[..., None])


@operator(
    "RoIPool", "RoIPoolF", gradient="@Gradient(I0, I1, O1, GO0) -> GI0", expected="N _ _ _, R _"
)
def roi_pool(
    x: Tensor, regions: Tensor, *, pooled_h: int = 1, pooled_w: int = 1, spatial_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each region part's maximum, 0 if empty, and its place in the image, -1 for none.

    Args:
        x: images, NCHW.
        regions: rows of image, x1, y1, x2, y2.
        pooled_h, pooled_w: the number of parts.
        spatial_scale: what the corners are multiplied by.
    """
    height, width = x.shape[2:]
    shape = (len(regions), x.shape[1], pooled_h, pooled_w)
    if x.is_meta:
        return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
    image, corners = _boxes(regions)
    x1, y1, x2, y2 = _rounded(corners * spatial_scale).unbind(1)
    rows, columns = _cells(y1, y2, pooled_h, height), _cells(x1, x2, pooled_w, width)
    values = x.new_zeros(shape)
    places = torch.full(shape, -1, dtype=torch.int64, device=x.device)
    chosen = x[image].flatten(2)
    for p in range(pooled_h):
        for q in range(pooled_w):
            inside = (rows[:, p, :, None] & columns[:, q, None, :]).flatten(1)[:, None]
            most, place = torch.where(inside, chosen, float("-inf")).max(2)
            some = inside.any(2)
            values[:, :, p, q] = torch.where(some, most, 0)
            places[:, :, p, q] = torch.where(some, place, -1)
    return values, places.to(torch.int32)


@operator("RoIPoolGradient", "RoIPoolFGradient", expected="N _ _ _, R _, R _ _ _, R _ _ _")
def roi_pool_gradient(x: Tensor, regions: Tensor, places: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `RoIPool`: the place of each maximum has it."""
    image, _ = _boxes(regions)
    flat, given = places.flatten(2).long(), dy.flatten(2)
    shape = (len(regions), x.shape[1], x.shape[2:].numel())
    found = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    found.scatter_add_(2, flat.clamp(min=0), torch.where(flat >= 0, given, 0))
    return torch.zeros_like(x).flatten(2).index_add(0, image, found).reshape(x.shape)


class _Sensitive:
    """What `PSRoIPool` and its gradient share: how much each pixel row and column counts."""

    def __init__(
        self, *, spatial_scale: float = 1.0, group_size: int = 1, output_dim: int = 1
    ) -> None:
        self.scale, self.parts, self.classes = spatial_scale, group_size, output_dim

    def weights(self, regions: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the weights (regions, parts, height) and (regions, parts, width)."""
        x1, y1, x2, y2 = _rounded(regions[:, 1:]).unbind(1)
        return self._means(y1, y2, height), self._means(x1, x2, width)

    def _means(self, first: Tensor, last: Tensor, size: int) -> Tensor:
        start, end = first * self.scale, (last + 1) * self.scale
        step = ((end - start).clamp(min=0.1) / self.parts)[:, None]
        place = torch.arange(self.parts, device=first.device)
        begin = (place * step + start[:, None]).floor().clamp(0, size)
        end = ((place + 1) * step + start[:, None]).ceil().clamp(0, size)
        inside = _between(begin, end, size).to(first.dtype)
        return inside / inside.sum(2, keepdim=True).clamp(min=1)

    def grouped(self, x: Tensor) -> Tensor:
        """Return images as (images, classes, parts, parts, height, width)."""
        needed = self.classes * self.parts**2
        if x.shape[1] != needed:
            raise ValueError(
                f"the images have {x.shape[1]} channels, expected output_dim x group_size^2 = {needed}"
            )
        return x.reshape(len(x), self.classes, self.parts, self.parts, *x.shape[2:])


@operator(
    "PSRoIPool",
    gradient="@Gradient(I0, I1, O1, GO0) -> GI0",
    outputs=(2, 2),
    expected="N C H W, R 5",
)
class PSRoIPool(_Sensitive):
    """The mean of each part of each region, in channels of its own (R-FCN, Dai et al., 2016)."""

    def __call__(self, x: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
        """Return means (regions, output_dim, group_size, group_size), 0 if empty; channels, int32.

        Args:
            x: images, N x (output_dim group_size^2) x H x W.
            regions: rows of image, x1, y1, x2, y2, in pixels of the original image.
        """
        images = self.grouped(x)
        y = x.new_zeros(len(regions), *images.shape[1:4])
        channels = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        places = channels.reshape(images.shape[1:4]).expand(y.shape)
        if not x.is_meta:
            rows, columns = self.weights(regions, *x.shape[2:])
            for number, image in enumerate(images):
                own = regions[:, 0].long() == number
                y[own] = torch.einsum("rph,dpqhw,rqw->rdpq", rows[own], image, columns[own])
        return y, places


@operator("PSRoIPoolGradient", expected="N C H W, R 5, R D P P, R D P P")
class PSRoIPoolGradient(_Sensitive):
    """The gradient of `PSRoIPool`."""

    def __call__(self, x: Tensor, regions: Tensor, places: Tensor, dy: Tensor) -> Tensor:
        rows, columns = self.weights(regions, *x.shape[2:])
        found = torch.zeros_like(self.grouped(x))
        for number in range(len(found)):
            own = regions[:, 0].long() == number
            found[number] = torch.einsum("rph,rdpq,rqw->dpqhw", rows[own], dy[own], columns[own])
        return found.reshape(x.shape)


def _weights(first: Tensor, length: Tensor, parts: int, size: int, ratio: int) -> Tensor:
    """Return how much each cell of one axis counts for each part: (regions, parts, size).

    Each part has `ratio` points, or ceil(length / parts), at equal distances; a point lies between
    two cells and has its share of both. A point more than a cell outside counts 0.
    """
    count = torch.full_like(length, ratio) if ratio > 0 else (length / parts).ceil()
    most = max(int(count.max()), 1) if len(count) else 1
    point = torch.arange(most, device=length.device)
    step = (length / parts)[:, None, None]
    part = torch.arange(parts, device=length.device)[None, :, None]
    spot = first[:, None, None] + part * step + (point + 0.5) * step / count[:, None, None]
    used = (point < count[:, None, None]) & (spot >= -1) & (spot <= size)
    spot = spot.clamp(0, size - 1)
    cell = torch.arange(size, device=length.device)
    share = (1 - (spot[..., None] - cell).abs()).clamp(min=0) * used[..., None]
    return share.sum(2) / count[:, None, None]


@dataclass(kw_only=True, eq=False)
class _Align:
    """What `RoIAlign` and its gradient share: the weights of the rows and columns of each part."""

    spatial_scale: float = 1.0
    pooled_h: int = 1
    pooled_w: int = 1
    sampling_ratio: int = -1
    aligned: bool = False
    order: str = "NCHW"

    def weights(self, x: Tensor, regions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image of each region, and the weights of rows and columns."""
        image, corners = _boxes(regions)
        x1, y1, x2, y2 = (corners * self.spatial_scale - (0.5 if self.aligned else 0.0)).unbind(1)
        lengths = [y2 - y1, x2 - x1]
        if not self.aligned:
            lengths = [length.clamp(min=1) for length in lengths]
        found = [
            _weights(first, length, parts, size, self.sampling_ratio)
            for first, length, parts, size in zip(
                (y1, x1), lengths, (self.pooled_h, self.pooled_w), x.shape[2:], strict=True
            )
        ]
        return image, found[0], found[1]


@operator("RoIAlign", gradient="RoIAlignGradient(I0, I1, GO0) -> GI0", expected="N _ _ _, R _")
class RoIAlign(_Align):
    """The mean of points of each region's parts, interpolated between pixels (Mask R-CNN)."""

    def __call__(self, x: Tensor, regions: Tensor) -> Tensor:
        """Return (regions, channels, pooled_h, pooled_w), the channels last in NHWC.

        Args:
            x: images.
            regions: rows of image, x1, y1, x2, y2; without the image it is the first.
        """
        (x,) = in_nchw(self.order, x)
        if x.is_meta:
            y = x.new_empty(len(regions), x.shape[1], self.pooled_h, self.pooled_w)
        else:
            image, rows, columns = self.weights(x, regions)
            y = torch.einsum("rph,rchw,rqw->rcpq", rows, x[image], columns)
        return in_order(self.order, y)


@operator("RoIAlignGradient", expected="N _ _ _, R _, R _ _ _")
class RoIAlignGradient(_Align):
    """The gradient of `RoIAlign`."""

    def __call__(self, x: Tensor, regions: Tensor, dy: Tensor) -> Tensor:
        x, dy = in_nchw(self.order, x, dy)
        image, rows, columns = self.weights(x, regions)
        found = torch.einsum("rph,rcpq,rqw->rchw", rows, dy, columns)
        dx = torch.zeros_like(x).index_add(0, image, found)
        return in_order(self.order, dx)


def moved_boxes(boxes: Tensor, deltas: Tensor, one: float) -> Tensor:
    """Return boxes moved by differences of centre (in sizes) and of size (as logarithms).

    Args:
        boxes: rows of x1, y1, x2, y2.
        deltas: rows of 4 values, or of 4 for each class; so is the result.
        one: 1 where a box from x1 to x2 has x2 - x1 + 1 pixels.
    """
    x1, y1, x2, y2 = (side[:, None] for side in boxes.unbind(1))
    wide, high = x2 - x1 + one, y2 - y1 + one
    dx, dy, dw, dh = (deltas[:, place::4] for place in range(4))
    centre_x, centre_y = dx * wide + x1 + 0.5 * wide, dy * high + y1 + 0.5 * high
    half_w = 0.5 * wide * dw.clamp(max=LARGEST_CHANGE).exp()
    half_h = 0.5 * high * dh.clamp(max=LARGEST_CHANGE).exp()
    sides = (centre_x - half_w, centre_y - half_h, centre_x + half_w - one, centre_y + half_h - one)
    return torch.stack(sides, 2).flatten(1)


@operator("BBoxTransform", inputs=(3, 3), expected="R _, R _, N _")
def bbox_transform(
    regions: Tensor,
    deltas: Tensor,
    info: Tensor,
    *,
    weights: list[float] = [1.0, 1.0, 1.0, 1.0],  # noqa: B006 (it is not changed)
    apply_scale: bool = True,
    legacy_plus_one: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return boxes moved by differences and cut at their image, and each image's number.

    Args:
        regions: rows of x1, y1, x2, y2, or of image and these.
        deltas: (boxes, 4 x classes): differences of centre (in sizes) and of size (as logarithms).
        info: (images, 3): height, width and scale.
        weights: what the differences are divided by.
        apply_scale: return boxes of the scaled image, not of the original.
        legacy_plus_one: a box from x1 to x2 has x2 - x1 + 1 pixels.
    """
    one = float(legacy_plus_one)
    image, corners = _boxes(regions)
    scale = info[image, 2:3]
    divisors = torch.tensor(weights, device=deltas.device).repeat(deltas.shape[1] // 4)
    boxes = moved_boxes(corners / scale, deltas / divisors, one)
    bottom, right = (torch.floor(info[image, :2] / scale + 0.5) - one).unbind(1)
    limits = torch.stack([right, bottom], 1).repeat(1, boxes.shape[1] // 2)
    made = torch.minimum(boxes.clamp(min=0), limits)
    splits = torch.bincount(image, minlength=len(info)).to(deltas.dtype)
    return made * scale if apply_scale else made, splits


@operator("RMACRegions", expected="N C H W")
def rmac_regions(x: Tensor, *, scales: int = 3, overlap: float = 0.4) -> Tensor:
    """Return squares of several sizes that cover images: image, x1, y1, x2, y2 (arXiv 1511.05879).

    Args:
        x: images, NCHW.
        scales: the number of sizes; size l is 2 / (l + 1) of the shorter side.
        overlap: the part of a square that lies in its neighbour along the longer side.
    """
    count, (height, width) = len(x), x.shape[2:]
    short = min(height, width)
    if not x.numel():
        return x.new_zeros(0, 5)
    gaps = [(max(height, width) - short) / steps for steps in range(1, 7)]
    misses = [abs((short - gap) / short - overlap) for gap in gaps]
    steps = misses.index(min(misses)) + 1
    found = [x.new_zeros(0, 4)]
    for scale in range(1, scales + 1):
        side = 2 * short // (scale + 1)
        if side == 0:
            break
        across = _starts(width, side, scale + steps * (width > height), x)
        down = _starts(height, side, scale + steps * (height > width), x)
        corners = torch.cartesian_prod(across, down)
        found.append(torch.cat([corners, corners + (side - 1)], 1))
    regions = torch.cat(found)
    image = torch.arange(count, dtype=x.dtype, device=x.device).repeat_interleave(len(regions))
    return torch.cat([image[:, None], regions.repeat(count, 1)], 1)


def _starts(size: int, side: int, parts: int, x: Tensor) -> Tensor:
    """Return where `parts` intervals of a length begin that lie evenly in an axis."""
    gap = (size - side) / (parts - 1) if parts > 1 else 0.0
    return (
        (torch.arange(parts, dtype=x.dtype, device=x.device) * gap).floor().clamp(max=size - side)
    )
