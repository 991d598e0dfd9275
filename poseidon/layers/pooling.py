"""Pooling over windows of an image, with Caffe's arithmetic at the border.

Law: output extents are Caffe's. ceil((S + 2p - k) / s) + 1 windows (floor under round_mode FLOOR); where there is
padding, a last window that would start at or beyond S + p is left out. An average divides by the part of the window
that lies inside the padded image S + 2p minus what hangs over its end, so zeros of the padding count and the overhang
does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.layers.registry import register
from poseidon.proto.caffe_pb2 import PoolingParameter

Pair = tuple[int, int]


def pooled_extents(image: Pair, kernel: Pair, stride: Pair, pad: Pair, *, ceil: bool) -> Pair:
    """Height and width of Caffe's pooled image.

    Raises:
        LayerError: no window fits, or the last one would lie wholly outside the image (Caffe reads garbage there).
    """
    extents = []
    for size, k, s, p in zip(image, kernel, stride, pad, strict=True):
        span = size + 2 * p - k
        count = (-(-span // s) if ceil else span // s) + 1
        # Caffe clips both axes as soon as either is padded.
        if any(pad) and (count - 1) * s >= size + p:
            count -= 1
        if count < 1:
            padded = tuple(i + 2 * j for i, j in zip(image, pad, strict=True))
            raise LayerError(f"kernel {times(kernel)} larger than padded input {times(padded)}")
        if (count - 1) * s - p >= size:
            raise LayerError(
                f"stride {times(stride)} with kernel {times(kernel)} puts the last window wholly outside the "
                f"{times(image)} input; use round_mode: FLOOR"
            )
        extents.append(count)
    return extents[0], extents[1]


@register("Pooling")
class Pooling(Layer):
    """The maximum or the mean of each window of each channel.

    Bottom: N x C x H x W. Top: N x C x H' x W'; for MAX an optional second top of the same shape holds the index
    y W + x of each maximum (the first of equals) and has no gradient.

    Fields (pooling_param): pool, kernel_size | kernel_h and kernel_w, stride | stride_h and stride_w,
    pad | pad_h and pad_w, global_pooling, round_mode. `engine` changes nothing here.
    """

    MAX_TOPS: ClassVar[int | None] = 2
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.pooling_param, bottoms[0]
        if len(shape) != 4:
            raise LayerError(f"bottom of shape {times(shape)} has {len(shape)} axes, expected 4 (NxCxHxW)")
        if param.pool == PoolingParameter.STOCHASTIC:
            raise LayerError("pool: STOCHASTIC is not supported yet; use MAX or AVE")
        self.is_max = param.pool == PoolingParameter.MAX
        self.with_mask = len(self.param.top) > 1
        if self.with_mask and not self.is_max:
            raise LayerError("has 2 tops, expected 1: only pool: MAX has a mask")
        image = (shape[2], shape[3])
        self._read_window(param, image)
        ceil = param.round_mode == PoolingParameter.CEIL
        self.extents = pooled_extents(image, self.kernel, self.stride, self.pad, ceil=ceil)
        self._choose_call(image)
        return [(*shape[:2], *self.extents)] * len(self.param.top)

    def _read_window(self, param: PoolingParameter, image: Pair) -> None:
        self.stride = pair(param, "stride", "stride", 1)
        self.pad = pair(param, "pad", "pad", 0)
        if param.global_pooling:
            if any(param.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
                raise LayerError("has global_pooling and a kernel size, expected one of them")
            if self.pad != (0, 0) or self.stride != (1, 1):
                raise LayerError("global_pooling allows only pad 0 and stride 1")
            self.kernel = image
            return
        self.kernel = pair(param, "kernel_size", "kernel", None)
        if min(self.kernel) < 1 or min(self.stride) < 1:
            raise LayerError(
                f"kernel {times(self.kernel)} and stride {times(self.stride)} must be at least 1"
            )
        if any(p and p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            raise LayerError(f"pad {times(self.pad)} must be smaller than the kernel {times(self.kernel)}")

    def _choose_call(self, image: Pair) -> None:
        """Find a call of torch whose windows are Caffe's; failing that, pad by hand.

        torch pads at most half a kernel, and its ceil rule clips each axis by itself.
        """
        self.by_hand = any(2 * p > k for p, k in zip(self.pad, self.kernel, strict=True))
        self.ceil_mode = False
        if self.by_hand:
            return
        for ceil_mode in (False, True):
            if torch_extents(image, self.kernel, self.stride, self.pad, ceil=ceil_mode) == self.extents:
                self.ceil_mode = ceil_mode
                return
        self.by_hand = True

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.by_hand:
            return self._pool_padded(bottom)
        window = (self.kernel, self.stride, self.pad)
        if not self.is_max:
            return functional.avg_pool2d(bottom, *window, self.ceil_mode)
        if not self.with_mask:
            return functional.max_pool2d(bottom, *window, 1, self.ceil_mode)
        top, where = functional.max_pool2d(bottom, *window, 1, self.ceil_mode, return_indices=True)
        return top, where.to(bottom.dtype)

    def _pool_padded(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Pad in the open, pool without padding, and drop the windows that Caffe leaves out."""
        (pad_h, pad_w), (high, wide) = self.pad, self.extents
        value = float("-inf") if self.is_max else 0.0
        padded = functional.pad(bottom, (pad_w, pad_w, pad_h, pad_h), value=value)
        if not self.is_max:
            return functional.avg_pool2d(padded, self.kernel, self.stride, 0, True)[:, :, :high, :wide]
        top, where = functional.max_pool2d(padded, self.kernel, self.stride, 0, 1, True, return_indices=True)
        top, where = top[:, :, :high, :wide], where[:, :, :high, :wide]
        if not self.with_mask:
            return top
        row, column = where // padded.shape[3] - pad_h, where % padded.shape[3] - pad_w
        return top, (row * bottom.shape[3] + column).to(bottom.dtype)


def pair(param: PoolingParameter, name: str, stem: str, default: int | None) -> Pair:
    """Field `name`, or both of `<stem>_h` and `<stem>_w`; Caffe allows one way or the other.

    Raises:
        LayerError: given both ways, half given, or missing.
    """
    tall, wide = f"{stem}_h", f"{stem}_w"
    given = [side for side in (tall, wide) if param.HasField(side)]
    if not given:
        if default is None and not param.HasField(name):
            raise LayerError(f"missing {name}")
        value = int(getattr(param, name))
        return value, value
    if param.HasField(name):
        raise LayerError(f"has both {name} and {tall}/{wide}, expected one of them")
    if len(given) == 1:
        raise LayerError(f"has only {given[0]}, expected both {tall} and {wide}")
    return int(getattr(param, tall)), int(getattr(param, wide))


def torch_extents(image: Pair, kernel: Pair, stride: Pair, pad: Pair, *, ceil: bool) -> Pair:
    """Height and width that torch's pooling gives, to compare with Caffe's."""
    extents = []
    for size, k, s, p in zip(image, kernel, stride, pad, strict=True):
        count = (size + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        if ceil and (count - 1) * s >= size + p:
            count -= 1
        extents.append(count)
    return extents[0], extents[1]
