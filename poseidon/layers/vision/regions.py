"""Pooling of regions of a feature map: ROIPooling of Fast R-CNN (Girshick, 2015).

Law: corners and parts are computed in float32, as in Caffe: 57 cells in 7 parts are 57 / 7 x 7 = 57.000004, so the last part
has a cell more. Numbers are rounded half away from 0, as by C.

Shape letters: R regions, C channels, H and W the map, P and Q parts of a region in height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.layers.common.rearrange import check_range
from poseidon.layers.registry import register

# Values of a region: index of the image, and two corners.
REGION = 5


def check_map_and_regions(feature: Shape, regions: Shape) -> None:
    """Raise LayerError unless the bottoms are a feature map and regions."""
    if len(feature) != 4:
        raise LayerError(f"bottom 0 has shape {times(feature)}, expected 4 axes (NxCxHxW)")
    if len(regions) < 2 or math.prod(regions[1:]) != REGION:
        raise LayerError(f"bottom 1 has shape {times(regions)}, expected {REGION} values for each region")


def split_regions(regions: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Return the index of each region's image, and its corners x1, y1, x2, y2 in float32.

    Raises:
        DataError: an index is outside 0 .. images - 1.
    """
    rows = regions.detach().reshape(-1, REGION)
    index = rows[:, 0].long()
    check_range(index, images)
    return index, rows[:, 1:].float()


def rounded(values: Tensor) -> Tensor:
    """Round half away from 0."""
    whole = values.trunc()
    return whole + ((values - whole).abs() >= 0.5) * values.sign()


def clipped(edges: Tensor, extent: int) -> Tensor:
    """Return edges as indices of cells from 0 to `extent`."""
    return edges.clamp(0, extent).long()


@register("ROIPooling")
class ROIPooling(Layer):
    """The maxima of pooled_h x pooled_w parts of each region of a feature map.

    A region from x1, y1 to x2, y2, both inclusive, is scaled by spatial_scale and rounded. Its part (i, j) covers rows
    floor(i h / pooled_h) to ceil((i + 1) h / pooled_h) of its height h (columns likewise), clipped to the map. The
    maximum of an empty part is 0. The gradient goes to the first of equal maxima.

    Bottoms: the feature map N x C x H x W; regions R x 5 (x 1 x 1): index of the image, x1, y1, x2, y2, without a
    gradient. Top: R x C x pooled_h x pooled_w. Fields (roi_pooling_param): pooled_h, pooled_w, spatial_scale.
    """

    MIN_BOTTOMS: ClassVar[int] = 2
    MAX_BOTTOMS: ClassVar[int | None] = 2

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, (shape, regions) = self.param.roi_pooling_param, bottoms
        check_map_and_regions(shape, regions)
        if min(param.pooled_h, param.pooled_w) < 1:
            raise LayerError("missing pooled_h or pooled_w, expected at least 1 each")
        self.parts, self.scale = (param.pooled_h, param.pooled_w), param.spatial_scale
        return [(regions[0], shape[1], *self.parts)]

    def forward(self, feature: Tensor, regions: Tensor) -> Tensor:
        image_R, corners = split_regions(regions, feature.shape[0])
        x1, y1, x2, y2 = rounded(corners * self.scale).unbind(1)
        rows = _parts(y1, y2, self.parts[0], feature.shape[2])
        columns = _parts(x1, x2, self.parts[1], feature.shape[3])
        top: Tensor = _PartMaxima.apply(feature, image_R, rows, columns)  # type: ignore[no-untyped-call]
        return top


def _parts(first_R: Tensor, last_R: Tensor, count: int, extent: int) -> Tensor:
    """Return the first cell of each part of a side and the cell after its last: 2 x R x count, clipped to the map."""
    part = ((last_R - first_R + 1).clamp(min=1) / count).unsqueeze(1)
    index = torch.arange(count, device=part.device)
    begin, end = (index * part).floor(), ((index + 1) * part).ceil()
    return clipped(torch.stack((begin, end)) + first_R.unsqueeze(1), extent)


class _PartMaxima(torch.autograd.Function):
    """The maximum of each part; 0 for an empty part. The gradient goes to the first maximum in the order of rows."""

    @staticmethod
    def forward(ctx: Any, feature: Tensor, image_R: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        (top_RP, bottom_RP), (left_RQ, right_RQ) = rows, columns
        channels, wide = feature.shape[1], feature.shape[3]
        flat = feature.flatten(2)
        image = image_R.view(-1, 1, 1)
        best = feature.new_full(
            (len(image_R), top_RP.shape[1], left_RQ.shape[1], channels), torch.finfo(feature.dtype).min
        )
        where = best.new_full(best.shape, -1, dtype=torch.long)
        for down in range(_longest(top_RP, bottom_RP)):
            y_RP = top_RP + down
            for right in range(_longest(left_RQ, right_RQ)):
                x_RQ = left_RQ + right
                inside = (y_RP < bottom_RP).unsqueeze(2) & (x_RQ < right_RQ).unsqueeze(1)
                cell = (y_RP.unsqueeze(2) * wide + x_RQ.unsqueeze(1)).masked_fill(~inside, 0)
                values = flat[image, :, cell]
                larger = inside.unsqueeze(3) & (values > best)
                best = torch.where(larger, values, best)
                where = torch.where(larger, cell.unsqueeze(3), where)
        empty = (bottom_RP <= top_RP).unsqueeze(2) | (right_RQ <= left_RQ).unsqueeze(1)
        ctx.save_for_backward(image_R, where)
        ctx.shape = feature.shape
        return best.masked_fill(empty.unsqueeze(3), 0).permute(0, 3, 1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        image_R, where = ctx.saved_tensors
        _, channels, high, wide = ctx.shape
        blob = torch.zeros(ctx.shape, dtype=g.dtype, device=g.device)
        plane = image_R.view(-1, 1, 1, 1) * channels + torch.arange(channels, device=g.device)
        found = where >= 0
        target = (plane * (high * wide) + where)[found]
        blob.view(-1).index_add_(0, target, g.permute(0, 2, 3, 1)[found])
        return blob, None, None, None


def _longest(begin: Tensor, end: Tensor) -> int:
    """Return the number of cells of the longest part."""
    return int((end - begin).max()) if begin.numel() else 0
