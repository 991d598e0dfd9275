"""Normalization over batches, channels, groups and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.layers.windows import in_nchw, in_order
from poseidon.caffe2.operators.registry import Context, operator


def by_channel(value: Tensor, like: Tensor) -> Tensor:
    """Return numbers by channel in a shape that broadcasts to images in the order NCHW."""
    return value.reshape(1, -1, *[1] * (like.dim() - 2))


def _batch_rule(maker: GradientMaker) -> None:
    outputs = [maker.GI(0), maker.GI(1), maker.GI(2)]
    if maker.argument("is_test", 0):
        inputs = [maker.I(0), maker.I(1), maker.GO(0), maker.I(3), maker.I(4)]
    else:
        inputs = [maker.I(0), maker.I(1), maker.GO(0), maker.O(3), maker.O(4)]
        if maker.argument("num_batches", 1) > 1:
            inputs += outputs[1:]
    maker.op("SpatialBNGradient", inputs, outputs)


@operator(
    "SpatialBN",
    gradient=_batch_rule,
    inputs=(5, 7),
    outputs=(1, 5),
    shapes="N C *S, C, C, C, C, C, C",
)
@dataclass(kw_only=True, eq=False)
class SpatialBN:
    """Batch normalization by channel.

    In training the running mean and variance keep `momentum` of their values; the rest comes from
    the batch, whose variance is unbiased there. The saved statistics are the batch's mean and 1 /
    sqrt(variance + epsilon). With `num_batches` the sums and sums of squares over several batches
    are inputs.
    """

    context: Context
    is_test: bool
    epsilon: float = 1e-5
    momentum: float = 0.9
    num_batches: int = 1
    order: str = "NCHW"

    def __post_init__(self) -> None:
        definition = self.context.definition
        same = list(definition.output[1:3]) == list(definition.input[3:5])
        self.in_place = same and self.context.device.type != "meta"

    def __call__(
        self,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        sums: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return y and in training the running mean and variance and the saved statistics."""
        (x,) = in_nchw(self.order, x)
        if self.is_test:
            y = torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, self.epsilon, True)
            return (in_order(self.order, y),)
        if not self.in_place:
            mean, variance = mean.clone(), variance.clone()
        if x.numel() == 0:
            y, saved, inverse = x.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
        elif sums is not None and squares is not None:
            y, saved, inverse = self._joined(x, scale, bias, mean, variance, sums, squares)
        else:
            y, saved, inverse = torch.native_batch_norm(
                x, scale, bias, mean, variance, True, 1 - self.momentum, self.epsilon
            )
        return in_order(self.order, y), mean, variance, saved, inverse

    def _joined(
        self,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        sums: Tensor,
        squares: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize with sums over all batches."""
        count = self.num_batches * x.numel() // max(x.shape[1], 1)
        saved = sums / count
        spread = squares / count - saved * saved
        inverse = (spread + self.epsilon).rsqrt()
        mean.mul_(self.momentum).add_((1 - self.momentum) * saved)
        variance.mul_(self.momentum).add_(
            (1 - self.momentum) * spread * (count / max(count - 1, 1))
        )
        factor = scale * inverse
        return by_channel(factor, x) * x + by_channel(bias - factor * saved, x), saved, inverse


@operator("SpatialBNGradient", inputs=(5, 7), shapes="N C *S, C, N C *S, C, C, C, C")
@dataclass(kw_only=True, eq=False)
class SpatialBNGradient:
    """The gradients of `SpatialBN`: of x, scale and bias."""

    is_test: bool = False
    epsilon: float = 1e-5
    num_batches: int = 1
    order: str = "NCHW"

    def __call__(
        self,
        x: Tensor,
        scale: Tensor,
        dy: Tensor,
        mean: Tensor,
        inverse: Tensor,
        ds: Tensor | None = None,
        db: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; in a test `inverse` is the variance, of batches ds, db are sums."""
        x, dy = in_nchw(self.order, x, dy)
        if x.numel() == 0:
            dx, ds, db = torch.zeros_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
        elif self.is_test:
            dx, ds, db = self._fixed(x, scale, dy, mean, inverse)
        elif ds is not None and db is not None:
            ds, db = ds / self.num_batches, db / self.num_batches
            count = x.numel() // max(x.shape[1], 1)
            centred = (x - by_channel(mean, x)) * by_channel(inverse, x)
            rest = (by_channel(db, x) + centred * by_channel(ds, x)) / count
            dx = by_channel(scale * inverse, x) * (dy - rest)
        else:
            dx, ds, db = torch.ops.aten.native_batch_norm_backward(
                dy, x, scale, None, None, mean, inverse, True, self.epsilon, [True, True, True]
            )
        return in_order(self.order, dx), ds, db

    def _fixed(
        self, x: Tensor, scale: Tensor, dy: Tensor, mean: Tensor, variance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inverse = (variance + self.epsilon).rsqrt()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        centred = (x - by_channel(mean, x)) * by_channel(inverse, x)
        return by_channel(scale * inverse, x) * dy, (dy * centred).sum(axes), dy.sum(axes)


@operator("ChannelStats")
def channel_stats(x: Tensor, *, order: str = "NCHW") -> tuple[Tensor, Tensor]:
    """Return the sum and the sum of squares of each channel."""
    (x,) = in_nchw(order, x)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    return x.sum(axes), (x * x).sum(axes)


@operator("ChannelBackpropStats", shapes="N C *S, C, C, N C *S")
def channel_backprop_stats(
    x: Tensor, mean: Tensor, inverse: Tensor, dy: Tensor, *, order: str = "NCHW"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of scale and bias of one batch."""
    x, dy = in_nchw(order, x, dy)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    centred = (x - by_channel(mean, x)) * by_channel(inverse, x)
    return (dy * centred).sum(axes), dy.sum(axes)


def _adjacent_channels(x: Tensor, size: int) -> Tensor:
    """Return each channel's sum (second dimension) with (size - 1) / 2 neighbours on each side."""
    reach = (size - 1) // 2
    padded = x.new_zeros((x.shape[0], x.shape[1] + 2 * reach, *x.shape[2:]))
    padded[:, reach : reach + x.shape[1]] = x
    return padded.unfold(1, 2 * reach + 1, 1).sum(-1)


@operator("LRN", gradient="LRNGradient(I0, O0, GO0) -> GI0", expected="N C *S")
def lrn(
    x: Tensor,
    *,
    size: int = 0,
    alpha: float = 0.0,
    beta: float = 0.0,
    bias: float = 1.0,
    order: str = "NCHW",
) -> tuple[Tensor, Tensor]:
    """Return x / scale^beta, and scale = bias + alpha / size * near channels' sum of squares."""
    (images,) = in_nchw(order, x)
    scale = bias + alpha / size * _adjacent_channels(images * images, size)
    y = images * scale**-beta
    return in_order(order, y), in_order(order, scale)


@operator("LRNGradient", expected="N C *S, N C *S, N C *S")
def lrn_gradient(
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    *,
    size: int = 0,
    alpha: float = 0.0,
    beta: float = 0.0,
    bias: float = 1.0,
    order: str = "NCHW",
) -> Tensor:
    x, y, dy = in_nchw(order, x, y, dy)
    scale = bias + alpha / size * _adjacent_channels(x * x, size)
    dx = dy * scale**-beta - 2 * alpha * beta / size * x * _adjacent_channels(dy * y / scale, size)
    return in_order(order, dx)
