"""Layers that change the extents of a map: Interp of the DeepLab branch of Caffe (Chen et al.,
2015), Upsample of SegNet (Badrinarayanan et al., 2015) and Reorg of Yolo (Redmon and Farhadi,
2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.caffe.layers.base import Layer, LayerError, Shape, check_image, check_positive, times
from poseidon.caffe.layers.rearrange import outside
from poseidon.caffe.layers.registry import register
from poseidon.errors import DataError, counted


@register("Interp")
class Interp(Layer):
    """Bilinear interpolation with aligned corners.

    Bottoms: N x C x H x W, cropped by a negative pad; with use_blob_size a blob of height H' and
    width W', without a gradient. Top: N x C x H' x W', by one of: the second bottom; height and
    width; the zoom_factor z, S + (S - 1)(z - 1); the shrink_factor s, floor((S - 1) / s) + 1;
    shrink_factor, then zoom_factor.

    Fields (interp_param): use_blob_size, height, width, zoom_factor, shrink_factor, pad_beg and
    pad_end (0 or less: crop so many rows and columns at the start and the end).
    """

    BOTTOMS = (1, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.interp_param, bottoms[0]
        for bottom in bottoms:
            check_image(bottom)
        if len(bottoms) != 1 + param.use_blob_size:
            raise LayerError(
                f"has {counted(len(bottoms), 'bottom')} and use_blob_size: "
                f"{str(param.use_blob_size).lower()}, expected a second bottom with "
                "use_blob_size: true"
            )
        self.front, self.back = -param.pad_beg, -param.pad_end
        if min(self.front, self.back) < 0:
            raise LayerError(
                f"pad_beg is {param.pad_beg} and pad_end is {param.pad_end}, expected 0 or less: "
                "they crop"
            )
        kept = tuple(extent - self.front - self.back for extent in shape[2:])
        if min(kept) < 1:
            raise LayerError(f"pad_beg and pad_end crop all of a {times(shape[2:])} image")
        self.extents = (
            (bottoms[1][2], bottoms[1][3])
            if param.use_blob_size
            else self._extents((kept[0], kept[1]))
        )
        return [(*shape[:2], *self.extents)]

    def _extents(self, kept: tuple[int, int]) -> tuple[int, int]:
        param = self.param.interp_param
        if param.HasField("height") or param.HasField("width"):
            if min(param.height, param.width) < 1:
                raise LayerError(
                    f"height is {param.height} and width is {param.width}, expected at least 1 "
                    "for both"
                )
            return param.height, param.width
        if not (param.HasField("zoom_factor") or param.HasField("shrink_factor")):
            raise LayerError(
                "has no size, expected height and width, zoom_factor, shrink_factor or "
                "use_blob_size"
            )
        if min(param.zoom_factor, param.shrink_factor) < 1:
            raise LayerError("zoom_factor and shrink_factor must be at least 1")
        shrunk = [(extent - 1) // param.shrink_factor + 1 for extent in kept]
        zoomed = [extent + (extent - 1) * (param.zoom_factor - 1) for extent in shrunk]
        return zoomed[0], zoomed[1]

    def forward(self, bottom: Tensor, like: Tensor | None = None) -> Tensor:
        high, wide = bottom.shape[2:]
        kept = bottom[:, :, self.front : high - self.back, self.front : wide - self.back]
        return functional.interpolate(kept, size=self.extents, mode="bilinear", align_corners=True)


@register("Upsample")
class Upsample(Layer):
    """The values of a map at the places where a pooling layer found its maxima; 0 elsewhere.

    Bottoms: a map N x C x H x W; the second top of a Pooling layer of the same shape: the index y
    W' + x of each value in the top, without a gradient. Top: N x C x H' x W'. If an index occurs
    twice, the later value stays, and both values get the gradient, as in SegNet's Caffe. An index
    of -1, of a window entirely outside the image, is left out.

    With one bottom it is the layer of Yolo's Caffe (Redmon and Farhadi, 2018):
    each value fills a square of scale x scale.

    Fields (upsample_param): upsample_h and upsample_w, the extents H' and W'; or scale (2 by
    default), or scale_h and scale_w, the factors of H and W, and with a factor of 2 pad_out_h and
    pad_out_w, which make H' and W' one less. With one bottom only scale.
    """

    BOTTOMS = (1, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, mask = bottoms[0], bottoms[-1]
        check_image(shape)
        if len(bottoms) == 1:
            return [(*shape[:2], *self._squares(shape))]
        if mask != shape:
            raise LayerError(
                f"bottoms have shapes {times(shape)} and {times(mask)}, expected equal shapes: an "
                "index for each value"
            )
        self.extents = self._extents((shape[2], shape[3]))
        return [(*shape[:2], *self.extents)]

    def _squares(self, shape: Shape) -> Shape:
        """Return height and width of the top of one bottom."""
        fields = {field.name for field, _ in self.param.upsample_param.ListFields()}
        self.scale = self.param.upsample_param.scale
        if fields != {"scale"} or self.scale < 1:
            raise LayerError(
                "has 1 bottom, expected scale: <at least 1> alone; the other fields need the mask "
                "of a Pooling layer as bottom 2"
            )
        return tuple(extent * self.scale for extent in shape[2:])

    def _extents(self, image: tuple[int, int]) -> tuple[int, int]:
        param = self.param.upsample_param
        if param.HasField("upsample_h") and param.HasField("upsample_w"):
            if min(param.upsample_h, param.upsample_w) < 2:
                raise LayerError(
                    f"upsample_h is {param.upsample_h} and upsample_w is {param.upsample_w}, "
                    "expected at least 2"
                )
            return param.upsample_h, param.upsample_w
        if param.HasField("upsample_h") or param.HasField("upsample_w"):
            raise LayerError("has only one of upsample_h and upsample_w, expected both")
        if param.HasField("scale_h") != param.HasField("scale_w"):
            raise LayerError("has only one of scale_h and scale_w, expected both")
        if param.HasField("scale_h") and param.HasField("scale"):
            raise LayerError("has both scale and scale_h/scale_w, expected one of them")
        scales = (param.scale_h, param.scale_w) if param.HasField("scale_h") else (param.scale,) * 2
        pads = (param.pad_out_h, param.pad_out_w)
        if min(scales) < 2:
            raise LayerError(f"scale is {times(scales)}, expected at least 2")
        if any(pad and scale != 2 for pad, scale in zip(pads, scales, strict=True)):
            raise LayerError(
                "pad_out_h and pad_out_w need a scale of 2; use upsample_h and upsample_w"
            )
        high, wide = (
            extent * scale - pad for extent, scale, pad in zip(image, scales, pads, strict=True)
        )
        return high, wide

    def forward(self, bottom: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return bottom.repeat_interleave(self.scale, 2).repeat_interleave(self.scale, 3)
        count = self.extents[0] * self.extents[1]
        if wrong := outside(mask, range(-1, count)):
            raise DataError(
                f"index {wrong} is outside the {times(self.extents)} top; its extents must be "
                "the extents of the pooled bottom: see upsample_h and upsample_w"
            )
        index = mask.detach().flatten(2).long()
        # One more cell takes the values without a place.
        top: Tensor = _Scatter.apply(
            bottom.flatten(2), torch.where(index < 0, count, index), count + 1
        )  # type: ignore[no-untyped-call]
        return top[..., :count].reshape(*bottom.shape[:2], *self.extents)


class _Scatter(torch.autograd.Function):
    """Values at indices; a value's gradient is that at its index, whether or not it stayed."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return values.new_zeros((*values.shape[:2], count)).scatter_(2, index, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return g.gather(2, index), None, None


@register("Reorg")
class Reorg(Layer):
    """Values in another shape: s x s neighbours become channels; `reverse` undoes it.

    Bottom: N x C x H x W. Top: N x C s^2 x H/s x W/s; with `reverse` N x C/s^2 x H s x W s. The
    values are in Darknet's order. Let D = C/s^2. With `reverse` channel k D + d, k = i s + j, has
    the cells (i, j) of the s x s squares of channel d of the top. Without it the memory of the
    bottom is read as D x H s x W s, and the cells (i, j) of the squares of channel d become channel
    k D + d of a C x H x W result, whose memory is read as the top. So one direction is not the
    inverse of the other.

    Fields (reorg_param): stride s; reverse.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.reorg_param, bottoms[0]
        check_image(shape)
        check_positive(param, "stride")
        self.stride, self.reverse = param.stride, param.reverse
        s, (_, channels, high, wide) = self.stride, shape
        if channels % s**2:
            raise LayerError(
                f"bottom has {channels} channels, expected a multiple of stride^2 = {s**2}"
            )
        if not self.reverse and (high % s or wide % s):
            raise LayerError(f"bottom is {high}x{wide}, expected multiples of stride {s}")
        if self.reverse:
            return [(shape[0], channels // s**2, high * s, wide * s)]
        return [(shape[0], channels * s**2, high // s, wide // s)]

    def forward(self, bottom: Tensor) -> Tensor:
        s, (count, channels, high, wide) = self.stride, bottom.shape
        inner = channels // s**2
        if self.reverse:
            squares = bottom.view(count, s, s, inner, high, wide).permute(0, 3, 4, 1, 5, 2)
            return squares.reshape(count, inner, high * s, wide * s)
        squares = bottom.reshape(count, inner, high, s, wide, s).permute(0, 3, 5, 1, 2, 4)
        return squares.reshape(count, channels * s**2, high // s, wide // s)
