"""Local response normalization (Krizhevsky et al., 2012), mean-variance and L2 normalization.

Law of LRN, with Caffe's constants: y = x / s^beta, with s = k + alpha/n sum of x^2 over n
neighbouring channels, or s = 1 + alpha/n^2 sum of x^2 over an n x n window of the same channel
(Caffe reads k across channels only). Values outside the blob count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.caffe.layers.base import (
    BlobSpec,
    Layer,
    LayerError,
    Shape,
    check_image,
    check_shape,
    times,
)
from poseidon.caffe.layers.fillers import filler_or
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import LRNParameter


def inverse_power(s: Tensor, beta: float) -> Tensor:
    """Return s^-beta for s > 0.

    For 0.75 and 0.5 it uses roots, which are several times faster than a power.
    """
    if beta == 0.75:
        root = s.rsqrt()
        return root.sqrt().mul_(root)
    return s.rsqrt() if beta == 0.5 else s.pow(-beta)


def channel_window_sum(x_NCS: Tensor, reach: int) -> Tensor:
    """Sum over the existing channels c - reach .. c + reach, by shifted additions: 2 reach
    passes over the memory.
    """
    total, channels = x_NCS.clone(), x_NCS.shape[1]
    for shift in range(1, min(reach, channels - 1) + 1):
        total[:, shift:] += x_NCS[:, :-shift]
        total[:, :-shift] += x_NCS[:, shift:]
    return total


class AcrossChannels(torch.autograd.Function):
    """y = x s^-beta, s = k + a sum x^2, a = alpha / n.

    With W the sum over the window (self-adjoint): dx = g s^-beta - 2 a beta x W(g y / s).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, reach: int, a: float, beta: float, k: float) -> Tensor:
        s = channel_window_sum(x.square(), reach).mul_(a).add_(k)
        ctx.save_for_backward(x, s)
        ctx.constants = reach, a, beta
        return inverse_power(s, beta).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = ctx.saved_tensors
        reach, a, beta = ctx.constants
        direct = inverse_power(s, beta).mul_(g)
        through = channel_window_sum((direct * x).div_(s), reach).mul_(x)
        return direct.sub_(through, alpha=2 * a * beta), None, None, None, None


@register("LRN")
class LRN(Layer):
    """Local response normalization across or within channels.

    Bottom: N x C x H x W. Top: the same.

    Fields (lrn_param): local_size n (odd), alpha, beta, k, norm_region. `engine` has no effect.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.lrn_param, bottoms[0]
        if param.local_size % 2 == 0:
            raise LayerError(f"local_size is {param.local_size}, expected an odd number")
        check_image(shape)
        self.size, self.k = param.local_size, param.k
        self.alpha, self.beta = param.alpha, param.beta
        self.across = param.norm_region == LRNParameter.ACROSS_CHANNELS
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        reach = self.size // 2
        if self.across:
            top: Tensor = AcrossChannels.apply(
                bottom, reach, self.alpha / self.size, self.beta, self.k
            )  # type: ignore[no-untyped-call]
            return top
        # avg_pool2d divides by the whole n x n window at the border too, as Caffe's pooling layer
        # does here.
        mean = functional.avg_pool2d(bottom.square(), self.size, 1, reach)
        return bottom * (1 + self.alpha * mean).pow(-self.beta)


class Standardize(torch.autograd.Function):
    """y = (x - m) / d of each row, d = sqrt(v) + eps, with m and v the row's mean and variance.

    The gradient is Caffe's, dx = (g - mean(g) - y mean(g y)) / d, which assumes that eps is small
    relative to sqrt(v).
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, eps: float) -> Tensor:
        y_RD = x_RD - x_RD.mean(1, keepdim=True)
        d_R1 = y_RD.square().mean(1, keepdim=True).sqrt_().add_(eps)
        y_RD.div_(d_R1)
        ctx.save_for_backward(y_RD, d_R1)
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RD: Tensor) -> tuple[Tensor | None, ...]:
        y_RD, d_R1 = ctx.saved_tensors
        product_RD = g_RD * y_RD
        along_R1 = product_RD.mean(1, keepdim=True)
        found_RD = torch.mul(y_RD, along_R1, out=product_RD).neg_().add_(g_RD)
        return found_RD.sub_(g_RD.mean(1, keepdim=True)).div_(d_R1), None


@register("MVN")
class MVN(Layer):
    """y = (x - mean) / (sqrt(variance) + eps), for each channel of each image, or for each image.

    Bottom: N x C x H x W; missing axes have extent 1. Top: the same with all 4 axes.

    Fields (mvn_param): normalize_variance (false: subtract the mean only), across_channels, eps.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.mvn_param, bottoms[0]
        if len(shape) > 4:
            raise LayerError(
                f"bottom of shape {times(shape)} has {len(shape)} axes, expected at most 4"
            )
        self.divides, self.across = param.normalize_variance, param.across_channels
        self.eps = param.eps
        self.trail = shape[1:] + (1,) * (4 - max(len(shape), 1))
        return [(shape[0] if shape else 1, *self.trail)]

    def forward(self, bottom: Tensor) -> Tensor:
        top = bottom.reshape(-1, *self.trail)
        rows = top.flatten(1) if self.across else top.flatten(2).flatten(0, 1)
        if not self.divides:
            return (rows - rows.mean(1, keepdim=True)).view(top.shape)
        standard: Tensor = Standardize.apply(rows, self.eps)  # type: ignore[no-untyped-call]
        return standard.view(top.shape)


@register("Normalize")
class Normalize(Layer):
    """y = s x / sqrt(sum of x^2 + eps), with the sum over channels or over the whole image.

    From SSD, Liu et al., 2016.

    Bottom: N x C x ... . Top: the same. The gradient at the bottom is the derivative. SSD's Caffe
    leaves the other channels' s out of the sum, so its gradient differs where the s of
    channel_shared: false are not equal.

    Fields (norm_param): across_spatial (true: over the whole image); channel_shared (true: one s
    for all channels); scale_filler of s, 1 by default; eps.

    Blobs: scale s, C, or a scalar with channel_shared.
    """

    TOPS_MAY_BE_OVERWRITTEN = True
    scale: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.norm_param, bottoms[0]
        check_shape("bottom", shape, "NxC...")
        self.axes = tuple(range(1, len(shape))) if param.across_spatial else (1,)
        self.eps = param.eps
        self.trailing = () if param.channel_shared else (1,) * (len(shape) - 2)
        blob = () if param.channel_shared else (shape[1],)
        self.declare(
            BlobSpec(name="scale", shape=blob, filler=filler_or(param, "scale_filler", 1.0))
        )
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        norm = bottom.square().sum(self.axes, keepdim=True).add_(self.eps).sqrt_()
        return bottom / norm * self.scale.view(self.scale.shape + self.trailing)
