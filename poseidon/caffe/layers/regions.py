"""Pooling of regions of a feature map: ROIPooling of Fast R-CNN (Girshick, 2015), PSROIPooling
of R-FCN (Dai et al., 2016) and ROIAlign of Mask R-CNN (He et al., 2017).

Law: corners and parts are computed in float32, as in Caffe: 57 cells in 7 parts are 57 / 7 x 7 =
57.000004, so the last part has a cell more. Numbers are rounded half away from 0, as by C.

Shape letters: R regions, C channels, H and W the map, P and Q parts of a region in height and
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poseidon.caffe.layers.base import (
    Layer,
    LayerError,
    Shape,
    check_image,
    check_positive,
    check_rows,
)
from poseidon.caffe.layers.rearrange import to_indices
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import ROIAlignParameter, ROIPoolingParameter
from poseidon.errors import DataError

# Values of a region: index of the image, and two corners.
REGION = 5


def check_map_and_regions(feature: Shape, regions: Shape) -> None:
    """Raise LayerError unless the bottoms are a feature map and regions."""
    check_image(feature, "bottom 0")
    check_rows("bottom 1", regions, REGION, "region")


def split_regions(regions: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Return the index of each region's image, and its corners x1, y1, x2, y2 in float32.

    Raises:
        DataError: an index is outside 0 .. images - 1, or on the CPU a corner is not finite.
    """
    rows = regions.detach().reshape(-1, REGION)
    index, corners = to_indices(rows[:, 0], images), rows[:, 1:].float()
    if corners.device.type == "cpu" and not bool(corners.isfinite().all()):
        region = int((~corners.isfinite()).any(1).nonzero()[0])
        raise DataError(
            f"region {region} has the corners {corners[region].tolist()}, expected finite numbers"
        )
    return index, corners


def rounded(values: Tensor) -> Tensor:
    """Round half away from 0."""
    whole = values.trunc()
    return whole + ((values - whole).abs() >= 0.5) * values.sign()


def clipped(edges: Tensor, extent: int) -> Tensor:
    """Return edges as indices of cells from 0 to `extent`."""
    return edges.clamp(0, extent).long()


class PooledRegions(Layer):
    """The base class of layers that divide each region into pooled_h x pooled_w parts."""

    BOTTOMS = (2, 2)

    def set_up_parts(
        self, param: ROIPoolingParameter | ROIAlignParameter, bottoms: Sequence[Shape]
    ) -> list[Shape]:
        """Read the parts and the scale, and return the shape of the top.

        Raises:
            LayerError: the bottoms are not a map and regions, or a number of parts is missing.
        """
        shape, regions = bottoms
        check_map_and_regions(shape, regions)
        check_positive(param, "pooled_h", "pooled_w")
        self.parts, self.scale = (param.pooled_h, param.pooled_w), param.spatial_scale
        return [(regions[0], shape[1], *self.parts)]


@register("ROIPooling")
class ROIPooling(PooledRegions):
    """The maxima of pooled_h x pooled_w parts of each region of a feature map.

    A region from x1, y1 to x2, y2, both inclusive, is scaled by spatial_scale and rounded. Its part
    (i, j) covers rows floor(i h / pooled_h) to ceil((i + 1) h / pooled_h) of its height h (columns
    likewise), clipped to the map. The maximum of an empty part is 0. The gradient goes to the first
    of equal maxima.

    Bottoms: the feature map N x C x H x W; regions R x 5 (x 1 x 1): index of the image, x1, y1, x2,
    y2, without a gradient. Top: R x C x pooled_h x pooled_w. Fields (roi_pooling_param): pooled_h,
    pooled_w, spatial_scale.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return self.set_up_parts(self.param.roi_pooling_param, bottoms)

    def forward(self, feature: Tensor, regions: Tensor) -> Tensor:
        image_R, corners = split_regions(regions, feature.shape[0])
        x1, y1, x2, y2 = rounded(corners * self.scale).unbind(1)
        rows = _parts(y1, y2, self.parts[0], feature.shape[2])
        columns = _parts(x1, x2, self.parts[1], feature.shape[3])
        top: Tensor = _PartMaxima.apply(feature, image_R, rows, columns)  # type: ignore[no-untyped-call]
        return top


def _parts(first_R: Tensor, last_R: Tensor, count: int, extent: int) -> Tensor:
    """Return the first cell of each part of a side and the cell after its last: 2 x R x count,
    clipped to the map.
    """
    part = ((last_R - first_R + 1).clamp(min=1) / count).unsqueeze(1)
    index = torch.arange(count, device=part.device)
    begin, end = (index * part).floor(), ((index + 1) * part).ceil()
    return clipped(torch.stack((begin, end)) + first_R.unsqueeze(1), extent)


class _PartMaxima(torch.autograd.Function):
    """The maximum of each part; 0 for an empty part.

    The gradient goes to the first maximum in the order of rows.
    """

    @staticmethod
    def forward(
        ctx: Any, feature: Tensor, image_R: Tensor, rows: Tensor, columns: Tensor
    ) -> Tensor:
        (top_RP, bottom_RP), (left_RQ, right_RQ) = rows, columns
        channels, wide = feature.shape[1], feature.shape[3]
        # The channels of a cell lie together, so that cells are copied as wholes.
        flat = feature.permute(0, 2, 3, 1).reshape(-1, channels)
        image = (image_R * (feature.shape[2] * wide)).view(-1, 1, 1)
        best = feature.new_full(
            (len(image_R), top_RP.shape[1], left_RQ.shape[1], channels),
            torch.finfo(feature.dtype).min,
        )
        where = best.new_full(best.shape, -1, dtype=torch.long)
        for down in range(_longest(top_RP, bottom_RP)):
            y_RP = top_RP + down
            for right in range(_longest(left_RQ, right_RQ)):
                x_RQ = left_RQ + right
                inside = (y_RP < bottom_RP).unsqueeze(2) & (x_RQ < right_RQ).unsqueeze(1)
                cell = (y_RP.unsqueeze(2) * wide + x_RQ.unsqueeze(1)).masked_fill(~inside, 0)
                values = flat[image + cell]
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
        count, channels, high, wide = ctx.shape
        cells = torch.zeros((count * high * wide, channels), dtype=g.dtype, device=g.device)
        found = where >= 0
        target = (where + image_R.view(-1, 1, 1, 1) * (high * wide)).masked_fill_(~found, 0)
        values = g.permute(0, 2, 3, 1) * found
        cells.scatter_add_(0, target.view(-1, channels), values.reshape(-1, channels))
        return cells.view(count, high, wide, channels).permute(0, 3, 1, 2), None, None, None


def _longest(begin: Tensor, end: Tensor) -> int:
    """Return the number of cells of the longest part."""
    return int((end - begin).max()) if begin.numel() else 0


@register("PSROIPooling")
class PSROIPooling(Layer):
    """The means of K x K parts of each region, each part from channels of its own.

    A region spans round(x1) scale to (round(x2) + 1) scale, at least 0.1 cells. Its part (i, j)
    covers rows floor(i h / K + y1) to ceil((i + 1) h / K + y1) of its height h (columns likewise),
    clipped to the map. Channel c of the top reads channel (c K + i) K + j of the map. The mean of
    an empty part is 0.

    Bottoms: the map N x (D K K) x H x W; regions R x 5 (x 1 x 1), without a gradient. Top: R x D x
    K x K. Fields (psroi_pooling_param): spatial_scale, output_dim D, group_size K.
    """

    BOTTOMS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, (shape, regions) = self.param.psroi_pooling_param, bottoms
        check_map_and_regions(shape, regions)
        self.depth, self.group, self.scale = param.output_dim, param.group_size, param.spatial_scale
        check_positive(param, "output_dim", "group_size")
        wanted = self.depth * self.group**2
        if shape[1] != wanted:
            raise LayerError(
                f"bottom 0 has {shape[1]} channels, expected output_dim x group_size^2 = {wanted}"
            )
        return [(regions[0], self.depth, self.group, self.group)]

    def forward(self, feature: Tensor, regions: Tensor) -> Tensor:
        image_R, corners = split_regions(regions, feature.shape[0])
        x1, y1, x2, y2 = rounded(corners).unbind(1)
        rows = self._means(y1 * self.scale, (y2 + 1) * self.scale, feature.shape[2]).to(
            feature.dtype
        )
        columns = self._means(x1 * self.scale, (x2 + 1) * self.scale, feature.shape[3]).to(
            feature.dtype
        )
        shape = (self.depth, self.group, self.group, *feature.shape[2:])
        tops = feature.new_empty((len(image_R), self.depth, self.group, self.group))
        parts = []
        for image in range(feature.shape[0]):
            chosen = (image_R == image).nonzero().flatten()
            found = torch.einsum("cpqhw,rph->rcpqw", feature[image].view(shape), rows[chosen])
            parts.append((chosen, torch.einsum("rcpqw,rqw->rcpq", found, columns[chosen])))
        for chosen, part in parts:
            tops = tops.index_copy(0, chosen, part)
        return tops

    def _means(self, begin_R: Tensor, end_R: Tensor, extent: int) -> Tensor:
        """Return the weight of each cell of a side in the mean of each part: R x K x extent."""
        part = ((end_R - begin_R).clamp(min=0.1) / self.group).unsqueeze(1)
        index = torch.arange(self.group, device=part.device)
        first = clipped((index * part + begin_R.unsqueeze(1)).floor(), extent).unsqueeze(2)
        last = clipped(((index + 1) * part + begin_R.unsqueeze(1)).ceil(), extent).unsqueeze(2)
        cell = torch.arange(extent, device=part.device)
        inside = ((cell >= first) & (cell < last)).to(part.dtype)
        return inside / (last - first).clamp(min=1)


@register("ROIAlign")
class ROIAlign(PooledRegions):
    """The means of bilinear samples in pooled_h x pooled_w parts of each region, without rounding.

    A region spans x1 scale to x2 scale, at least 1 cell. Each part has sampling_ratio x
    sampling_ratio samples at even distances; with a ratio of 0 or less, as many as cells, rounded
    up. A sample outside the map by more than a cell is 0; nearer ones have the value at the border.

    Bottoms: the map N x C x H x W; regions R x 5 (x 1 x 1), without a gradient. Top: R x C x
    pooled_h x pooled_w. Fields (roi_align_param): pooled_h, pooled_w, spatial_scale,
    sampling_ratio.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.ratio = self.param.roi_align_param.sampling_ratio
        return self.set_up_parts(self.param.roi_align_param, bottoms)

    def forward(self, feature: Tensor, regions: Tensor) -> Tensor:
        image_R, corners = split_regions(regions, feature.shape[0])
        x1, y1, x2, y2 = (corners * self.scale).unbind(1)
        tops = []
        for region, image in enumerate(image_R.tolist()):
            rows = self._samples(
                float(y1[region]), float(y2[region]), self.parts[0], feature.shape[2]
            )
            columns = self._samples(
                float(x1[region]), float(x2[region]), self.parts[1], feature.shape[3]
            )
            tops.append(rows.to(feature) @ feature[image] @ columns.to(feature).T)
        return torch.stack(tops) if tops else feature.new_zeros((0, feature.shape[1], *self.parts))

    def _samples(self, begin: float, end: float, count: int, extent: int) -> Tensor:
        """Return the weight of each cell of a side in the mean of each part: count x extent."""
        part = max(end - begin, 1.0) / count
        samples = self.ratio if self.ratio > 0 else math.ceil(part)
        weights = torch.zeros(count, extent, dtype=torch.float64)
        for index in range(count):
            for sample in range(samples):
                place = begin + index * part + (sample + 0.5) * part / samples
                if -1.0 <= place <= extent:
                    place = min(max(place, 0.0), extent - 1.0)
                    low = min(int(place), extent - 1)
                    high = min(low + 1, extent - 1)
                    weights[index, low] += (low + 1 - place) / samples
                    weights[index, high] += (place - low) / samples
        return weights
