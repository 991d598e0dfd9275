"""Losses of the distance between two blobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.caffe.layers.base import Layer, LayerError, Shape, times, without_trailing_ones
from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.layers.registry import register
from poseidon.errors import DataError


@register("EuclideanLoss")
class EuclideanLoss(Layer):
    """loss = 1/(2N) sum of (a - b)^2.

    Bottoms: a and b, both N x ..., with the same number of values per item; both
    have gradients. Top: a scalar. No fields.
    """

    BOTTOMS = (2, 2)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b = bottoms
        if not a or not b or a[0] != b[0] or math.prod(a) != math.prod(b):
            raise LayerError(
                f"bottoms have shapes {times(a)} and {times(b)}, expected the same number of "
                "values per item"
            )
        return [()]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b.reshape(a.shape)).square().sum() / (2 * a.shape[0])


@register("SmoothL1Loss")
class SmoothL1Loss(Layer):
    """loss = 1/N sum of v f(w (a - b)), f(d) = (sigma d)^2 / 2 where |d| < 1 / sigma^2, else |d|
    - 1 / (2 sigma^2).

    From Fast R-CNN (Girshick, 2015). With three bottoms it is the form of that paper's Caffe and of
    SSD's: v is 1, and the gradient is f'(d) / N, without a further factor w.

    Bottoms: a and b; inside weights w; outside weights v; of one shape but for extents of 1 at the
    end. Only a and b have gradients. Top: a scalar. Fields (smooth_l1_loss_param): sigma.
    """

    BOTTOMS = (2, 4)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        plain = without_trailing_ones(bottoms[0])
        if not bottoms[0] or any(without_trailing_ones(shape) != plain for shape in bottoms):
            raise LayerError(
                f"bottoms have shapes {', '.join(map(times, bottoms))}, expected equal shapes"
            )
        self.sigma = self.param.smooth_l1_loss_param.sigma
        if not self.sigma > 0:
            raise LayerError(f"sigma is {self.sigma:g}, expected a positive number")
        return [()]

    def forward(
        self, a: Tensor, b: Tensor, inside: Tensor | None = None, outside: Tensor | None = None
    ) -> Tensor:
        difference = a - b.reshape(a.shape)
        if inside is not None and outside is not None:
            difference = difference * inside.detach().reshape(a.shape)
        elif inside is not None:
            difference = difference + (difference * inside.reshape(a.shape) - difference).detach()
        losses = functional.smooth_l1_loss(
            difference, torch.zeros_like(difference), reduction="none", beta=1 / self.sigma**2
        )
        if outside is not None:
            losses = losses * outside.detach().reshape(a.shape)
        return losses.sum() / a.shape[0]


@register("ContrastiveLoss")
class ContrastiveLoss(Layer):
    """loss = 1/(2N) sum of y d^2 + (1 - y) max(margin - d, 0)^2, with d = |a - b| (Hadsell et
    al., 2006).

    With `legacy_version` the second term is max(margin - d^2, 0).

    Bottoms: a and b, both N x C (x 1 x 1); y, N values, 1 for a similar pair and 0 for a dissimilar
    one, without a gradient. Top: a scalar. Fields (contrastive_loss_param): margin, legacy_version.
    """

    BOTTOMS = (3, 3)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b, similar = bottoms
        for shape in (a, b):
            if len(shape) < 2 or shape[:2] != a[:2] or any(extent != 1 for extent in shape[2:]):
                raise LayerError(
                    f"bottoms have shapes {times(a)} and {times(b)}, expected NxC, or NxCx1x1, "
                    "for both"
                )
        if math.prod(similar) != a[0]:
            raise LayerError(
                f"bottom 2 has shape {times(similar)}, expected {a[0]} values: one a pair"
            )
        param = self.param.contrastive_loss_param
        self.margin, self.legacy = param.margin, param.legacy_version
        return [()]

    def forward(self, a: Tensor, b: Tensor, similar: Tensor) -> Tensor:
        difference_NC = a.flatten(1) - b.flatten(1)
        squared_N = difference_NC.square().sum(1)
        margin_N = self._margin_term(squared_N)
        if wrong := outside(similar, INTEGERS):
            raise DataError(f"label {wrong} is not 1, of a similar pair, or 0")
        # Caffe reads the label as a boolean.
        is_similar_N = similar.detach().flatten().trunc() != 0
        return torch.where(is_similar_N, squared_N, margin_N).sum() / (2 * a.shape[0])

    def _margin_term(self, squared_N: Tensor) -> Tensor:
        if self.legacy:
            return functional.relu(self.margin - squared_N)
        term: Tensor = SquaredMargin.apply(squared_N, self.margin)  # type: ignore[no-untyped-call]
        return term


class SquaredMargin(torch.autograd.Function):
    """max(margin - d, 0)^2 of a squared distance d^2.

    Its gradient by d^2 is -max(margin - d, 0) / (d + 1e-4), so that it is not 0 / 0, as in Caffe.
    """

    @staticmethod
    def forward(ctx: Any, squared_N: Tensor, margin: float) -> Tensor:
        distance_N = squared_N.sqrt()
        short_N = (margin - distance_N).clamp_(min=0)
        ctx.save_for_backward(short_N, distance_N)
        return short_N.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        short_N, distance_N = ctx.saved_tensors
        return -g * short_N / (distance_N + 1e-4), None
