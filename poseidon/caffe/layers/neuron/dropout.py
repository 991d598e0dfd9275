"""Dropout, and SeLuDropout, its form for self-normalizing networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import TRAIN


@register("Dropout")
class Dropout(Layer):
    """TRAIN: y = m x / (1 - r), each m drawn 0 with probability r, else 1. TEST: y = x.

    With `scale_train: false` (Fast R-CNN's branch of Caffe), TRAIN: y = m x, and TEST: y = (1 - r)
    x.

    With `sample_weights_test` (Bayesian SegNet's Caffe) TEST draws as TRAIN does.

    Bottom: any shape. Top: the same; may be in place. Fields (dropout_param): dropout_ratio r, 0 <=
    r < 1; scale_train; sample_weights_test.
    """

    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        ratio = self.param.dropout_param.dropout_ratio
        if not 0 <= ratio < 1:
            raise LayerError(f"dropout_ratio is {ratio:g}, expected at least 0 and below 1")
        self.keep = 1.0 - ratio
        in_train = self.context.phase == TRAIN or self.param.dropout_param.sample_weights_test
        self.active = in_train and ratio > 0
        self.scales = self.param.dropout_param.scale_train
        self.factor = 1.0 if in_train or self.scales else self.keep
        return [bottoms[0]]

    def forward(self, bottom: Tensor) -> Tensor:
        if not self.active:
            return bottom if self.factor == 1 else bottom * self.factor
        mask = torch.empty_like(bottom, requires_grad=False)
        mask.bernoulli_(self.keep, generator=self.generator)
        if self.scales:
            mask.div_(self.keep)
        return bottom.mul_(mask) if self.overwrites_bottom else bottom * mask


@register("SeLuDropout")
class SeLuDropout(Layer):
    """TRAIN: y = a (m x + (1 - m) alpha) + b, each m drawn 0 with probability r, else 1.

    TEST: y = x. With q = 1 - r, a = (q + alpha^2 q (1 - q))^(-1/2) and b = -a (1 - q) alpha, which
    keep a mean of 0 and a variance of 1: alpha dropout of Klambauer et al., 2017.

    Bottom: any shape. Top: the same; may be in place. Fields (selu_dropout_param): dropout_ratio r,
    0 <= r < 1; alpha.
    """

    IS_RANDOM = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.selu_dropout_param
        ratio, self.alpha = param.dropout_ratio, param.alpha
        if not 0 <= ratio < 1:
            raise LayerError(f"dropout_ratio is {ratio:g}, expected at least 0 and below 1")
        self.keep = 1.0 - ratio
        self.active = self.context.phase == TRAIN and ratio > 0
        self.scale = (self.keep + self.alpha**2 * self.keep * ratio) ** -0.5
        self.shift = -self.scale * ratio * self.alpha
        return [bottoms[0]]

    def forward(self, bottom: Tensor) -> Tensor:
        if not self.active:
            return bottom
        kept = torch.empty_like(bottom, requires_grad=False)
        kept.bernoulli_(self.keep, generator=self.generator)
        dropped = self.scale * self.alpha + self.shift
        return torch.where(kept.bool(), bottom * self.scale + self.shift, dropped)
