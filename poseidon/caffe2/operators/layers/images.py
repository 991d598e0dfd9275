"""Images: order of dimensions, sizes, padding, blocks and the order of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.input_shapes import check_tensor
from poseidon.caffe2.operators.layers.windows import (
    Windowed,
    channels_last,
    channels_second,
    in_nchw,
    in_order,
)
from poseidon.caffe2.operators.registry import Context, operator


@operator("NCHW2NHWC", gradient="NHWC2NCHW(GO0) -> GI0", expected="N C *S")
def nchw_to_nhwc(x: Tensor) -> Tensor:
    return channels_last(x).contiguous()


@operator("NHWC2NCHW", gradient="NCHW2NHWC(GO0) -> GI0", expected="N * C")
def nhwc_to_nchw(x: Tensor) -> Tensor:
    return channels_second(x).contiguous()


@operator("NormalizePlanarYUV", shapes="N C H W, A C, B C")
def normalize_planar_yuv(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return (x - mean) / deviation by channel; the first row of each has the values."""
    return (x - mean[0][:, None, None]) / deviation[0][:, None, None]


def pulled_back(function: Callable[[Tensor], Tensor], shape: Sequence[int], dy: Tensor) -> Tensor:
    """Return the gradient of a linear function at an input of a shape."""
    with torch.enable_grad():
        x = torch.zeros(shape, dtype=dy.dtype, device=dy.device, requires_grad=True)
        found: tuple[Tensor, ...] = torch.autograd.grad(function(x), x, dy)
    return found[0]


def _scales(given: Tensor | None, height: float, width: float) -> tuple[float, float]:
    if given is None or given.is_meta:
        return height, width
    first, second = given.tolist()
    return first, second


def _nearest(images: Tensor, height: float, width: float) -> Tensor:
    """Return NCHW images resized: each pixel is the one at its place / scale, rounded down."""
    for axis, scale in ((2, height), (3, width)):
        size = images.shape[axis]
        places = torch.arange(int(size * scale), device=images.device)
        images = images.index_select(axis, (places / scale).long().clamp(max=size - 1))
    return images


@operator("ResizeNearest", gradient="@Gradient(GO0, I0, I1?) -> GI0", expected="N C H W, 2")
def resize_nearest(
    x: Tensor,
    scales: Tensor | None = None,
    *,
    width_scale: float = 1.0,
    height_scale: float = 1.0,
    order: str = "NCHW",
) -> Tensor:
    """Return images resized by the nearest pixel; a second input gives both scales."""
    height, width = _scales(scales, height_scale, width_scale)
    (images,) = in_nchw(order, x)
    return in_order(order, _nearest(images, height, width))


@operator("ResizeNearestGradient", expected="N _ _ _, N _ _ _, 2")
def resize_nearest_gradient(
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None = None,
    *,
    width_scale: float = 1.0,
    height_scale: float = 1.0,
    order: str = "NCHW",
) -> Tensor:
    resized = partial(resize_nearest, width_scale=width_scale, height_scale=height_scale)
    return pulled_back(lambda z: resized(z, scales, order=order), x.shape, dy)


@operator("UpsampleBilinear", gradient="@Gradient(GO0, I0, I1?) -> GI0", expected="N C H W, 2")
def upsample_bilinear(
    x: Tensor, scales: Tensor | None = None, *, width_scale: float = 1.0, height_scale: float = 1.0
) -> Tensor:
    """Return images resized by bilinear interpolation; corners stay corners."""
    height, width = _scales(scales, height_scale, width_scale)
    size = (int(x.shape[2] * height), int(x.shape[3] * width))
    return functional.interpolate(x, size, mode="bilinear", align_corners=True)


@operator("UpsampleBilinearGradient", expected="N _ _ _, N _ _ _, 2")
def upsample_bilinear_gradient(
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None = None,
    *,
    width_scale: float = 1.0,
    height_scale: float = 1.0,
) -> Tensor:
    resized = partial(upsample_bilinear, width_scale=width_scale, height_scale=height_scale)
    return pulled_back(lambda z: resized(z, scales), x.shape, dy)


@operator("UpsampleNearest", gradient="UpsampleNearestGradient(I0, GO0) -> GI0", expected="* H W")
def upsample_nearest(x: Tensor, *, scale: int = 2) -> Tensor:
    """Return images whose pixels are squares of scale x scale pixels, as in Detectron.

    Args:
        x: images, the last two dimensions are height and width.
        scale: at least 1.
    """
    return x.repeat_interleave(scale, -2).repeat_interleave(scale, -1)


@operator("UpsampleNearestGradient", expected="* H W, * _ _")
def upsample_nearest_gradient(x: Tensor, dy: Tensor, *, scale: int = 2) -> Tensor:
    height, width = x.shape[-2:]
    check_tensor("the gradient", dy, (*x.shape[:-2], height * scale, width * scale))
    return dy.reshape(*x.shape[:-2], height, scale, width, scale).sum((-3, -1))


@operator(
    "SpatialNarrowAs",
    gradient="SpatialNarrowAsGradient(I0, I1, GO0) -> GI0",
    expected="N C H W, N *",
)
def spatial_narrow_as(x: Tensor, like: Tensor) -> Tensor:
    """Return the upper left part of images in the size of others, as in Detectron.

    Args:
        x: images, N x C x H x W.
        like: N x C x H x W, or N x H x W; not larger.
    """
    height, width = like.shape[-2:]
    check_tensor("the input to be like", like, (*x.shape[: like.dim() - 2], height, width))
    if like.dim() not in (3, 4) or height > x.shape[2] or width > x.shape[3]:
        raise ValueError(
            f"the input to be like has the shape {tuple(like.shape)}, expected 3 or 4 dimensions and "
            f"at most {x.shape[2]} x {x.shape[3]} pixels"
        )
    return x[:, :, :height, :width].contiguous()


@operator("SpatialNarrowAsGradient", expected="N C H W, N *, N C _ _")
def spatial_narrow_as_gradient(x: Tensor, like: Tensor, dy: Tensor) -> Tensor:
    right, below = x.shape[3] - dy.shape[3], x.shape[2] - dy.shape[2]
    return functional.pad(dy, (0, right, 0, below))


class _Padding(Windowed):
    """The padding of images: `pad` or `pad_t`, `pad_l`, `pad_b`, `pad_r`, and a mode."""

    modes: dict[bytes, str] = {b"constant": "constant", b"reflect": "reflect", b"edge": "replicate"}  # noqa: RUF012

    def __init__(self, *, context: Context, mode: bytes = b"constant", value: float = 0.0) -> None:
        if mode not in self.modes:
            raise ValueError(f"PadImage: there is no mode {mode.decode()!r}")
        super().__init__(context=context)
        heads, tails = self.windows.paddings(2)
        self.sides = [heads[1], tails[1], heads[0], tails[0]]
        self.mode = self.modes[mode]
        self.value = value

    def pad(self, images: Tensor, value: float) -> Tensor:
        """Return images in the order NCHW with their padding."""
        if self.mode == "constant":
            return functional.pad(images, self.sides, value=value)
        return functional.pad(images, self.sides, mode=self.mode)


@operator("PadImage", gradient="PadImageGradient(GO0) -> GI0", expected="N C H W")
class PadImage(_Padding):
    """Images with a border of a value, a reflection, or their edge; a negative one cuts."""

    def __call__(self, x: Tensor) -> Tensor:
        (images,) = self.images(x)
        return self.ordered(self.pad(images, self.value))


@operator("PadImageGradient", expected="N C H W")
class PadImageGradient(_Padding):
    """The gradient of `PadImage`."""

    def __call__(self, dy: Tensor) -> Tensor:
        (given,) = self.images(dy)
        left, right, top, bottom = self.sides
        shape = (*given.shape[:2], given.shape[2] - top - bottom, given.shape[3] - left - right)
        return self.ordered(pulled_back(lambda x: self.pad(x, 0.0), shape, given))


def _shuffled(x: Tensor, rows: int, order: str) -> Tensor:
    """Return x whose channels are read by columns of a matrix with so many rows."""
    axis = x.dim() - 1 if order == "NHWC" else 1
    if rows < 1 or x.shape[axis] % rows:
        raise ValueError(f"{x.shape[axis]} channels do not make {rows} groups")
    result: Tensor = x.unflatten(axis, (rows, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return result


@operator("ChannelShuffle", gradient="ChannelShuffleGradient(GO0) -> GI0", expected="N C *S")
def channel_shuffle(x: Tensor, *, group: int = 1, order: str = "NCHW") -> Tensor:
    """Return x with the channels of all groups by turns."""
    return _shuffled(x, group, order)


@operator("ChannelShuffleGradient", expected="N C *S")
def channel_shuffle_gradient(dy: Tensor, *, group: int = 1, order: str = "NCHW") -> Tensor:
    return _shuffled(dy, dy.shape[-1 if order == "NHWC" else 1] // group, order)


@dataclass(kw_only=True, eq=False)
class _Blocks:
    """Blocks of pixels as images of a larger batch, and back."""

    block_size: int = 2
    pad: int = 0
    pad_t: int | None = None
    pad_l: int | None = None
    pad_b: int | None = None
    pad_r: int | None = None
    order: str = "NCHW"

    def __post_init__(self) -> None:
        given = (self.pad_l, self.pad_r, self.pad_t, self.pad_b)
        self.sides = [self.pad if side is None else side for side in given]
        if self.order != "NCHW":
            raise ValueError(f"blocks of images are in the order NCHW only, not {self.order}")


@operator("SpaceToBatch", gradient="BatchToSpace(GO0) -> GI0", expected="N C H W")
class SpaceToBatch(_Blocks):
    """The pixels of one place in all blocks are an image; these follow each other in the batch."""

    def __call__(self, x: Tensor) -> Tensor:
        size = self.block_size
        padded = functional.pad(x, self.sides)
        count, channels, height, width = padded.shape
        parts = padded.reshape(count, channels, height // size, size, width // size, size)
        return parts.permute(3, 5, 0, 1, 2, 4).reshape(-1, channels, height // size, width // size)


@operator("BatchToSpace", gradient="SpaceToBatch(GO0) -> GI0", expected="N C H W")
class BatchToSpace(_Blocks):
    """The inverse of `SpaceToBatch`."""

    def __call__(self, x: Tensor) -> Tensor:
        size = self.block_size
        _, channels, height, width = x.shape
        parts = x.reshape(size, size, -1, channels, height, width)
        images = parts.permute(2, 3, 4, 0, 5, 1).reshape(-1, channels, height * size, width * size)
        return functional.pad(images, [-side for side in self.sides])


@operator("IntegralImage", gradient="IntegralImageGradient(I0, GO0) -> GI0", expected="N C H W")
def integral_image(x: Tensor) -> Tensor:
    """Return the sums of all values above and to the left of each place, (N, C, H + 1, W + 1)."""
    return functional.pad(x.cumsum(2).cumsum(3), [1, 0, 1, 0])


@operator("IntegralImageGradient", expected="N C _ _, N C _ _")
def integral_image_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of `IntegralImage` as Caffe2 has it: sums of what is above and left."""
    return dy[:, :, : x.shape[2], : x.shape[3]].cumsum(2).cumsum(3)
