"""Activation layers: element-wise functions, which may run in place.

Dropout, and SeLuDropout, its form for self-normalizing networks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from poseidon.caffe.layers.base import BlobSpec, Layer, LayerError, Shape, check_shape
from poseidon.caffe.layers.fillers import filler_or
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import TRAIN


class Activation(Layer):
    """The base class of activations: one bottom, one top of the same shape."""

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]]


@register("ReLU")
class ReLU(Activation):
    """y = max(0, x) + negative_slope min(0, x). The slope at 0 is negative_slope.

    Bottom: any shape. Top: the same. Fields (relu_param): negative_slope. `engine` has no effect.
    """

    takes_any_form = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.slope = self.param.relu_param.negative_slope
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        if self.slope == 0:
            return torch.relu_(bottom) if self.overwrites_bottom else torch.relu(bottom)
        # In place, the backward pass needs the sign of x, which only a positive slope keeps.
        return functional.leaky_relu(
            bottom, self.slope, inplace=self.overwrites_bottom and self.slope > 0
        )


@register("Sigmoid")
class Sigmoid(Activation):
    """y = 1 / (1 + exp(-x)).

    Bottom: any shape. Top: the same. No fields but `engine`, which has no effect.
    """

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.sigmoid(bottom)


@register("TanH")
class TanH(Activation):
    """y = tanh(x).

    Bottom: any shape. Top: the same. No fields but `engine`, which has no effect.
    """

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.tanh(bottom)


@register("ELU")
class ELU(Activation):
    """y = x for x > 0, else alpha (exp(x) - 1). Clevert et al., 2015.

    Bottom: any shape. Top: the same. Fields (elu_param): alpha.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.alpha = self.param.elu_param.alpha
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.elu(bottom, self.alpha)


@register("SeLu")
class SeLu(Activation):
    """y = lambda x for x > 0, else lambda alpha (exp(x) - 1). Klambauer et al., 2017.

    Bottom: any shape. Top: the same. Fields (selu_param): lambda, alpha.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.selu_param
        # `lambda` is a word of Python.
        self.factor, self.alpha = float(getattr(param, "lambda")), param.alpha
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.elu(bottom, self.alpha) * self.factor


@register("PReLU")
class PReLU(Activation):
    """y = max(0, x) + a min(0, x), with a learned slope a for each channel, or one for all.

    He et al., 2015.

    Bottom: N x C x ... . Top: the same. Fields (prelu_param): channel_shared; filler, 0.25 by
    default.

    Blobs: slope C, or a scalar with channel_shared.
    """

    TOPS_MAY_BE_OVERWRITTEN = True
    slope: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.prelu_param, bottoms[0]
        check_shape("bottom", shape, "NxC...")
        filler = filler_or(param, "filler", 0.25)
        self.declare(
            BlobSpec(name="slope", shape=() if param.channel_shared else (shape[1],), filler=filler)
        )
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.prelu(bottom, self.slope)


@register("Swish")
class Swish(Activation):
    """y = x / (1 + exp(-beta x)). Ramachandran et al., 2017.

    Bottom: any shape. Top: the same. Fields (swish_param): beta.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.beta = self.param.swish_param.beta
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return (
            functional.silu(bottom)
            if self.beta == 1
            else bottom * torch.sigmoid(bottom * self.beta)
        )


@register("BNLL")
class BNLL(Activation):
    """y = log(1 + exp(x)), binomial normal log likelihood.

    Bottom: any shape. Top: the same. No fields.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.softplus(bottom, threshold=50)


@register("Clip")
class Clip(Activation):
    """y = max(min, min(x, max)). The slope is 1 from min to max, both included, and 0 outside.

    Bottom: any shape. Top: the same. Fields (clip_param): min, max, both needed.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.clip_param
        for name in ("min", "max"):
            if not param.HasField(name):
                raise LayerError(f"missing {name} of clip_param, expected a number")
        self.low, self.high = param.min, param.max
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        if self.low > self.high:
            return bottom.clamp(max=self.high).clamp(min=self.low)
        return bottom.clamp(self.low, self.high)


@register("Threshold")
class Threshold(Activation):
    """y = 1 where x > threshold, else 0. Has no gradient.

    Bottom: any shape. Top: the same. Fields (threshold_param): threshold.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.threshold = self.param.threshold_param.threshold
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return (bottom > self.threshold).to(bottom.dtype)


@register("ReLU6")
class ReLU6(Activation):
    """y = min(max(0, x), 6).

    Bottom: any shape. Top: the same. No fields. From MobileNet (Howard et al., 2017).
    """

    takes_any_form = True

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.relu6(bottom)


@register("Dropout")
class Dropout(Layer):
    """TRAIN: y = m x / (1 - r), each m drawn 0 with probability r, else 1. TEST: y = x.

    With `scale_train: false` (Fast R-CNN's branch of Caffe), TRAIN: y = m x, and TEST: y = (1 - r)
    x.

    With `sample_weights_test` (Bayesian SegNet's Caffe) TEST draws as TRAIN does.

    Bottom: any shape. Top: the same; may be in place. Fields (dropout_param): dropout_ratio r, 0 <=
    r < 1; scale_train; sample_weights_test.
    """

    takes_any_form = True
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
