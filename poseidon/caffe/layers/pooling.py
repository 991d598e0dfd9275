"""Pooling, with Caffe's rules at the border.

Law: the output has Caffe's extents: ceil((S + 2p - k) / s) + 1 windows (floor with round_mode
FLOOR). With padding, a last window that would start at or beyond S + p is dropped. An average
divides by the number of values of the window inside the padded image S + 2p, so the zeros of the
padding count and an overhang beyond it does not.

SPP: spatial pyramid pooling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe.layers.base import (
    LARGEST_BLOB,
    Layer,
    LayerError,
    Shape,
    check_image,
    check_positive,
    times,
)
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import TEST, LayerParameter, PoolingParameter, SPPParameter

Pair = tuple[int, int]


def pooled_extents(
    image: Pair, kernel: Pair, stride: Pair, pad: Pair, *, ceil: bool, empty: bool = False
) -> Pair:
    """Return height and width of Caffe's pooled image.

    Args:
        image: height and width of the image.
        kernel: height and width of a window.
        ceil: count a window that exceeds the end.
        empty: allow a last window entirely outside the image (not for an average, where Caffe
            returns 0 / 0).

    Raises:
        LayerError: no window fits, or the last one is entirely outside the image and `empty` is
            False.
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
        if (count - 1) * s - p >= size and not empty:
            raise LayerError(
                f"stride {times(stride)} with kernel {times(kernel)} puts the last window entirely "
                f"outside the {times(image)} input; use round_mode: FLOOR"
            )
        extents.append(count)
    return extents[0], extents[1]


@register("Pooling")
class Pooling(Layer):
    """The maximum, the mean or a random value of each window of each channel.

    STOCHASTIC (Zeiler and Fergus, 2013), for non-negative values: in TRAIN a value is drawn with a
    probability proportional to itself; in TEST the top is the mean under these probabilities, sum
    x^2 / sum x.

    Bottom: N x C x H x W. Top: N x C x H' x W'; for MAX an optional second top of the same shape
    holds the index y W + x of each maximum (the first of equal ones) and has no gradient. A window
    entirely outside the image has the maximum -FLT_MAX, and the index -1.

    Fields (pooling_param): pool, kernel_size | kernel_h and kernel_w, stride | stride_h and
    stride_w, pad | pad_h and pad_w, global_pooling, round_mode (CEIL or FLOOR), or ceil_mode in its
    place (true or false). `engine` has no effect.
    """

    TOPS = (1, 2)
    TOPS_MAY_BE_OVERWRITTEN = True
    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.pooling_param, bottoms[0]
        check_image(shape)
        self.is_stochastic = param.pool == PoolingParameter.STOCHASTIC
        self.is_max = param.pool == PoolingParameter.MAX
        self.with_mask = len(self.param.top) > 1
        if self.with_mask and not self.is_max:
            raise LayerError("has 2 tops, expected 1: only pool: MAX has a mask")
        image = (shape[2], shape[3])
        self._read_window(param, image)
        ceil, empty = rounds_up(param), self.is_max
        self.extents = pooled_extents(
            image, self.kernel, self.stride, self.pad, ceil=ceil, empty=empty
        )
        self._choose_call(image)
        self.takes_any_form = not (self.is_stochastic or self.with_mask)
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
        if max(*self.kernel, *self.stride) > LARGEST_BLOB:
            raise LayerError(
                f"kernel {times(self.kernel)} and stride {times(self.stride)} must be at most "
                f"{LARGEST_BLOB}"
            )
        if min(self.kernel) < 1 or min(self.stride) < 1:
            raise LayerError(
                f"kernel {times(self.kernel)} and stride {times(self.stride)} must be at least 1"
            )
        if self.is_stochastic and any(self.pad):
            raise LayerError("pool: STOCHASTIC allows no pad")
        if any(p and p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            raise LayerError(
                f"pad {times(self.pad)} must be smaller than the kernel {times(self.kernel)}"
            )

    def _choose_call(self, image: Pair) -> None:
        """Find a mode of torch whose windows are Caffe's, or fall back to explicit padding.

        torch pads at most half a kernel, and its ceil rule clips each axis separately.
        """
        self.by_hand = any(2 * p > k for p, k in zip(self.pad, self.kernel, strict=True))
        self.ceil_mode = False
        if self.by_hand:
            return
        for ceil_mode in (False, True):
            if (
                torch_extents(image, self.kernel, self.stride, self.pad, ceil=ceil_mode)
                == self.extents
            ):
                self.ceil_mode = ceil_mode
                return
        self.by_hand = True

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.is_stochastic:
            return self._pool_at_random(bottom)
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
        """Pad explicitly, at least as far as the windows reach, pool without padding,
        and drop the windows that Caffe drops.
        """
        (pad_h, pad_w), (high, wide) = self.pad, self.extents
        if not self.is_max:
            padded = functional.pad(bottom, (pad_w, pad_w, pad_h, pad_h))
            return functional.avg_pool2d(padded, self.kernel, self.stride, 0, True)[
                :, :, :high, :wide
            ]
        more_h, more_w = self._overhang(bottom)
        around = (pad_w, max(pad_w, more_w), pad_h, max(pad_h, more_h))
        padded = functional.pad(bottom, around, value=float("-inf"))
        top, where = functional.max_pool2d(padded, self.kernel, self.stride, return_indices=True)
        top, where = top[:, :, :high, :wide], where[:, :, :high, :wide]
        empty = top.detach() == float("-inf")
        top = top.masked_fill(empty, torch.finfo(top.dtype).min)
        if not self.with_mask:
            return top
        row, column = where // padded.shape[3] - pad_h, where % padded.shape[3] - pad_w
        return top, (row * bottom.shape[3] + column).masked_fill(empty, -1).to(bottom.dtype)

    def _overhang(self, bottom: Tensor) -> Pair:
        """Return how far the last windows exceed the end of the image."""
        high, wide = (
            (count - 1) * s + k - p - size
            for count, s, k, p, size in zip(
                self.extents, self.stride, self.kernel, self.pad, bottom.shape[2:], strict=True
            )
        )
        return max(high, 0), max(wide, 0)

    def _pool_at_random(self, bottom: Tensor) -> Tensor:
        """Return a value of each window, drawn in proportion to itself; in TEST, the mean."""
        more_h, more_w = self._overhang(bottom)
        padded = functional.pad(bottom, (0, more_w, 0, more_h))
        (high, wide), (step_h, step_w) = self.kernel, self.stride
        windows = padded.unfold(2, high, step_h).unfold(3, wide, step_w).flatten(4)
        if self.context.phase == TEST:
            return windows.square().sum(-1) / (windows.sum(-1) + torch.finfo(bottom.dtype).tiny)
        reached = windows.detach().cumsum(-1)
        draw = torch.rand(reached.shape[:-1], generator=self.generator, device=bottom.device)
        threshold = draw.to(bottom.dtype) * reached[..., -1]
        # The first value at which the cumulative sum reaches the threshold.
        chosen = (reached >= threshold.unsqueeze(-1)).int().argmax(-1, keepdim=True)
        return windows.gather(-1, chosen).squeeze(-1)


def rounds_up(param: PoolingParameter) -> bool:
    """Return whether a window that exceeds the end of the image counts.

    Raises:
        LayerError: round_mode and ceil_mode contradict each other.
    """
    ceil = bool(param.round_mode == PoolingParameter.CEIL)
    if not param.HasField("ceil_mode"):
        return ceil
    if param.HasField("round_mode") and ceil != param.ceil_mode:
        raise LayerError(
            f"has round_mode: {'CEIL' if ceil else 'FLOOR'} and ceil_mode: "
            f"{str(param.ceil_mode).lower()}, expected one of them"
        )
    return bool(param.ceil_mode)


def pair(param: PoolingParameter, name: str, stem: str, default: int | None) -> Pair:
    """Return field `name`, or both of `<stem>_h` and `<stem>_w`.

    Raises:
        LayerError: both forms are set, one of `<stem>_h` and `<stem>_w` is missing, or none is set.
    """
    tall, wide = f"{stem}_h", f"{stem}_w"
    sides = [side for side in (tall, wide) if param.HasField(side)]
    if not sides:
        if default is None and not param.HasField(name):
            raise LayerError(f"missing {name}")
        value = int(getattr(param, name))
        return value, value
    if param.HasField(name):
        raise LayerError(f"has both {name} and {tall}/{wide}, expected one of them")
    if len(sides) == 1:
        raise LayerError(f"has only {sides[0]}, expected both {tall} and {wide}")
    return int(getattr(param, tall)), int(getattr(param, wide))


def torch_extents(image: Pair, kernel: Pair, stride: Pair, pad: Pair, *, ceil: bool) -> Pair:
    """Return height and width of torch's pooled image, to compare with Caffe's."""
    extents = []
    for size, k, s, p in zip(image, kernel, stride, pad, strict=True):
        count = (size + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        if ceil and (count - 1) * s >= size + p:
            count -= 1
        extents.append(count)
    return extents[0], extents[1]


POOLS = {
    SPPParameter.MAX: PoolingParameter.MAX,
    SPPParameter.AVE: PoolingParameter.AVE,
    SPPParameter.STOCHASTIC: PoolingParameter.STOCHASTIC,
}


@register("SPP")
class SPP(Layer):
    """Pooling in 2^l x 2^l windows at each level l of a pyramid, concatenated (He et al., 2014).

    Bottom: N x C x H x W. Top: N x C (4^pyramid_height - 1)/3, the flattened levels in order; with
    one level N x C x 1 x 1, as in Caffe.

    Fields (spp_param): pyramid_height, pool. `engine` has no effect.
    """

    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.spp_param, bottoms[0]
        check_image(shape)
        check_positive(param, "pyramid_height")
        self.levels = [self._level(level, shape) for level in range(param.pyramid_height)]
        if len(self.levels) == 1:
            return [(*shape[:2], 1, 1)]
        bins = sum(4**level for level in range(param.pyramid_height))
        return [(shape[0], shape[1] * bins)]

    def _level(self, level: int, shape: Shape) -> Pooling:
        """Return one level's Pooling layer, with windows and padding for its number of bins."""
        bins = 2**level
        kernel = [-(-extent // bins) for extent in shape[2:]]
        pad = [(k * bins - extent + 1) // 2 for k, extent in zip(kernel, shape[2:], strict=True)]
        param = PoolingParameter(pool=POOLS[self.param.spp_param.pool])
        param.kernel_h, param.kernel_w = kernel
        param.stride_h, param.stride_w = kernel
        param.pad_h, param.pad_w = pad
        pooling = Pooling(
            LayerParameter(type="Pooling", top=["pooled"], pooling_param=param), self.context
        )
        try:
            pooled = pooling.setup([shape])[0]
        except LayerError as error:
            raise LayerError(f"pyramid level {level} of {bins}x{bins} windows: {error}") from error
        if pooled[2:] != (bins, bins):
            raise LayerError(
                f"pyramid level {level} has {times(pooled[2:])} windows of a {times(shape[2:])} "
                f"image, expected {bins}x{bins}"
            )
        return pooling

    def forward(self, bottom: Tensor) -> Tensor:
        pooled = []
        for level in self.levels:
            level.generator = self.generator
            pooled.append(level(bottom))
        return (
            pooled[0] if len(pooled) == 1 else torch.cat([level.flatten(1) for level in pooled], 1)
        )
