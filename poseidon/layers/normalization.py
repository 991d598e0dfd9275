"""LRN: local response normalization. Krizhevsky et al., 2012, with Caffe's constants.

Law: y = x / s^beta, with s = k + alpha/n sum of x^2 over n neighbouring channels, or s = 1 + alpha/n^2 sum of x^2 over
an n x n window of the same channel (Caffe reads k across channels only). Values outside the blob count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.layers.base import Layer, LayerError, Shape, times
from poseidon.layers.registry import register
from poseidon.proto.caffe_pb2 import LRNParameter


def inverse_power(s: Tensor, beta: float) -> Tensor:
    """s^-beta for s > 0. The usual 0.75 and 0.5 by roots, several times faster than a power."""
    if beta == 0.75:
        root = s.rsqrt()
        return root.sqrt().mul_(root)
    return s.rsqrt() if beta == 0.5 else s.pow(-beta)


def channel_window_sum(x_NCS: Tensor, reach: int) -> Tensor:
    """Sum over channels c - reach .. c + reach that exist, by shifted additions: 2 reach passes over the memory."""
    total, channels = x_NCS.clone(), x_NCS.shape[1]
    for shift in range(1, min(reach, channels - 1) + 1):
        total[:, shift:] += x_NCS[:, :-shift]
        total[:, :-shift] += x_NCS[:, shift:]
    return total


class AcrossChannels(torch.autograd.Function):
    """y = x s^-beta, s = k + a sum x^2, a = alpha / n. With W the sum over the window (symmetric, so its own adjoint):
    dx = g s^-beta - 2 a beta x W(g y / s).
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
    """Local response normalization across channels or within each.

    Bottom: N x C x H x W. Top: the same.

    Fields (lrn_param): local_size n (odd), alpha, beta, k, norm_region. `engine` changes nothing here.
    """

    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.lrn_param, bottoms[0]
        if param.local_size % 2 == 0:
            raise LayerError(f"local_size is {param.local_size}, expected an odd number")
        if len(shape) != 4:
            raise LayerError(f"bottom of shape {times(shape)} has {len(shape)} axes, expected 4 (NxCxHxW)")
        self.size, self.alpha, self.beta, self.k = param.local_size, param.alpha, param.beta, param.k
        self.across = param.norm_region == LRNParameter.ACROSS_CHANNELS
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        reach = self.size // 2
        if self.across:
            top: Tensor = AcrossChannels.apply(bottom, reach, self.alpha / self.size, self.beta, self.k)  # type: ignore[no-untyped-call]
            return top
        # avg_pool2d divides by the whole n x n window at the border too, as Caffe's pooling layer does here.
        mean = functional.avg_pool2d(bottom.square(), self.size, 1, reach)
        return bottom * (1 + self.alpha * mean).pow(-self.beta)
