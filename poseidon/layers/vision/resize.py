"""Interp: bilinear resizing, of the DeepLab branch of Caffe (Chen et al., 2015)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from poseidon.layers.base import Layer, LayerError, Shape, check_image, times
from poseidon.layers.registry import register


@register("Interp")
class Interp(Layer):
    """Bilinear interpolation with aligned corners.

    Bottom: N x C x H x W, cropped by a negative pad. Top: N x C x H' x W', by one of: height and width; the
    zoom_factor z, S + (S - 1)(z - 1); the shrink_factor s, floor((S - 1) / s) + 1; shrink_factor, then zoom_factor.

    Fields (interp_param): height, width, zoom_factor, shrink_factor, pad_beg and pad_end (0 or less: crop so many rows and
    columns at the start and the end).
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.interp_param, bottoms[0]
        check_image(shape)
        self.front, self.back = -param.pad_beg, -param.pad_end
        if min(self.front, self.back) < 0:
            raise LayerError(
                f"pad_beg is {param.pad_beg} and pad_end is {param.pad_end}, expected 0 or less: they crop"
            )
        kept = tuple(extent - self.front - self.back for extent in shape[2:])
        if min(kept) < 1:
            raise LayerError(f"pad_beg and pad_end crop all of a {times(shape[2:])} image")
        self.extents = self._extents((kept[0], kept[1]))
        return [(*shape[:2], *self.extents)]

    def _extents(self, kept: tuple[int, int]) -> tuple[int, int]:
        param = self.param.interp_param
        if param.HasField("height") or param.HasField("width"):
            if min(param.height, param.width) < 1:
                raise LayerError(
                    f"height is {param.height} and width is {param.width}, expected at least 1 for both"
                )
            return param.height, param.width
        if not (param.HasField("zoom_factor") or param.HasField("shrink_factor")):
            raise LayerError("has no size, expected height and width, zoom_factor or shrink_factor")
        if min(param.zoom_factor, param.shrink_factor) < 1:
            raise LayerError("zoom_factor and shrink_factor must be at least 1")
        shrunk = [(extent - 1) // param.shrink_factor + 1 for extent in kept]
        zoomed = [extent + (extent - 1) * (param.zoom_factor - 1) for extent in shrunk]
        return zoomed[0], zoomed[1]

    def forward(self, bottom: Tensor) -> Tensor:
        high, wide = bottom.shape[2:]
        kept = bottom[:, :, self.front : high - self.back, self.front : wide - self.back]
        return functional.interpolate(kept, size=self.extents, mode="bilinear", align_corners=True)
