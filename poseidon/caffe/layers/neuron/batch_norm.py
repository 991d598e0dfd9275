"""Batch normalization (Ioffe and Szegedy, 2015), with Caffe's three blobs of statistics.

Law: only forward updates the blobs, m <- f m + mean, v <- f v + n / (n - 1) variance, s <- f s + 1,
with f the moving average fraction and n the number of values of a channel. The test phase uses the
estimates m / s and v / s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.base import BlobSpec, Layer, LayerError, Shape
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import TEST, FillerParameter


@register("BatchNorm")
class BatchNorm(Layer):
    """y = (x - mean) / sqrt(variance + eps), with statistics over every axis but the second.

    Bottom: N x C x ... ; a bottom of one axis is one channel. Top: the same; may be in place.

    Fields (batch_norm_param): use_global_stats, by default true in phase TEST, false in TRAIN;
    moving_average_fraction; eps.

    Blobs: sum of means C, sum of variances C, scale factor 1. Solvers do not update them.
    """

    TOPS_MAY_BE_OVERWRITTEN = True
    STATISTICS = True
    mean: nn.Parameter
    variance: nn.Parameter
    factor: nn.Parameter
    _frozen: tuple[Tensor, Tensor] | None = None

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.batch_norm_param, bottoms[0]
        if not shape:
            raise LayerError("bottom is a scalar, expected at least 1 axis")
        in_test = self.context.phase == TEST
        self.reads_estimates = (
            param.use_global_stats if param.HasField("use_global_stats") else in_test
        )
        self.updates_statistics = not self.reads_estimates
        self.fraction, self.eps = param.moving_average_fraction, param.eps
        channels = 1 if len(shape) == 1 else shape[1]
        self.declare(
            *(
                BlobSpec(name=name, shape=(extent,), filler=FillerParameter(), learns=False)
                for name, extent in (("mean", channels), ("variance", channels), ("factor", 1))
            )
        )
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        return self.normalize(bottom, None, None)

    def normalize(self, bottom: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the top, multiplied by `weight` and plus `bias` of each channel
        unless None, in one pass over the memory.
        """
        if bottom.dim() == 1:
            return self.normalize(bottom.reshape(1, 1, -1), weight, bias).view(-1)
        if self.reads_estimates:
            mean, variance = self.estimates()
            return torch.batch_norm(
                bottom, weight, bias, mean, variance, False, 0.0, self.eps, True
            )
        # With a momentum of 1 torch's running statistics become the statistics of this batch.
        mean = torch.zeros_like(self.mean, requires_grad=False)
        variance = torch.zeros_like(mean)
        top = torch.batch_norm(bottom, weight, bias, mean, variance, True, 1.0, self.eps, True)
        if bottom.numel() == bottom.shape[1]:
            variance = torch.zeros_like(variance)  # a single value has variance 0, not 0 / 0
        self._accumulate(mean, variance)
        return top

    def freeze_estimates(self) -> None:
        """Compute the estimates now, once: the blobs do not change any more."""
        self._frozen = self.estimates()

    @torch.no_grad()
    def estimates(self) -> tuple[Tensor, Tensor]:
        """Return the accumulated mean and variance, initially zeros."""
        if self._frozen is not None:
            return self._frozen
        factor = float(self.factor)
        scale = 1 / factor if factor else 0.0
        return self.mean * scale, self.variance * scale

    @torch.no_grad()
    def _accumulate(self, mean: Tensor, variance: Tensor) -> None:
        torch.add(mean, self.mean, alpha=self.fraction, out=self.mean)
        torch.add(variance, self.variance, alpha=self.fraction, out=self.variance)
        self.factor.mul_(self.fraction).add_(1)
