"""Softmax and SoftmaxWithLoss.

Shape letters: N the axes before the class axis, C classes, S the axes after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.rearrange import outside
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import LossParameter
from poseidon.errors import DataError
from poseidon.exchange.device import device_of

# Caffe takes the logarithm of max(probability, FLT_MIN): a loss never exceeds 87.3365.
LOG_FLT_MIN = math.log(torch.finfo(torch.float32).tiny)


@register("Softmax")
class Softmax(Layer):
    """y_c = exp(x_c) / sum over c' of exp(x_c'), along `axis`.

    Bottom: any shape. Top: the same. Fields (softmax_param): axis. `engine` has no effect.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.axis = canonical_axis(self.param.softmax_param.axis, bottoms[0])
        return [bottoms[0]]

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.softmax(bottom, self.axis)


class NegativeLogLikelihood(torch.autograd.Function):
    """The sum of -log softmax(x)[label] over the items that are not ignored,
    weighted by class, divided by `normalizer`.

    The value is limited to Caffe's maximum, but the gradient, (softmax - one hot) / normalizer, is
    not, as in Caffe.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NCS: Tensor,
        label_N1S: Tensor,
        ignored_N1S: Tensor | None,
        weight_N1S: Tensor | None,
        normalizer: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        log_probability = torch.log_softmax(x_NCS, 1)
        losses = log_probability.gather(1, label_N1S).clamp_(min=LOG_FLT_MIN).neg_()
        if ignored_N1S is not None:
            losses.masked_fill_(ignored_N1S, 0)
        if weight_N1S is not None:
            losses.mul_(weight_N1S)
        ctx.save_for_backward(log_probability, label_N1S, ignored_N1S, weight_N1S)
        ctx.normalizer = normalizer
        ctx.mark_non_differentiable(log_probability)
        return losses.sum().div_(normalizer), log_probability

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        log_probability, label, ignored, weight = ctx.saved_tensors
        diff = log_probability.exp()
        diff.scatter_add_(1, label, diff.new_full((), -1.0).expand(label.shape))
        if ignored is not None:
            diff.masked_fill_(ignored, 0)
        if weight is not None:
            diff.mul_(weight)
        return diff.mul_(g / ctx.normalizer), None, None, None, None


def check_labels(scores: Shape, labels: Shape, axis: int, *, name: str) -> None:
    """Raise LayerError unless there is a label for each item of the scores.

    Args:
        scores: N x C x S.
        labels: any shape with N x S values.
        axis: the class axis of `scores`.
        name: the name of the label bottom.
    """
    expected = math.prod(scores[:axis]) * math.prod(scores[axis + 1 :])
    if math.prod(labels) == expected:
        return
    items = scores[0] if scores and axis > 0 else 0
    if labels and items and labels[0] == items:
        found, wanted = math.prod(labels) // items, expected // items
        values = "value" if found == 1 else "values"
        raise LayerError(f"bottom '{name}' has {found} {values} per item, expected {wanted}")
    raise LayerError(
        f"bottom '{name}' of shape {times(labels)} has {math.prod(labels)} values, expected "
        f"{expected}: one for each "
        f"item of the scores of shape {times(scores)}, whose class axis is {axis}"
    )


def label_indices(
    label: Tensor, classes: int, ignore_label: int | None
) -> tuple[Tensor, Tensor | None]:
    """Convert labels to indices. Also return a mask of the ignored ones, whose index is 0.

    Raises:
        DataError: a label is outside 0 .. classes - 1; see `poseidon.caffe.layers.rearrange`.
    """
    label, ignored = label.detach(), None
    if ignore_label is not None:
        ignored = label.trunc() == ignore_label
        label = label.masked_fill(ignored, 0)
    if wrong := outside(label, range(classes)):
        raise DataError(
            f"label {wrong} is outside 0..{classes - 1}, the indices of the {classes} scores"
        )
    return label.long(), ignored


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(Layer):
    """loss = -1/Z sum over items of log softmax(x)[label], at most 87.3365 an item (Caffe's
    smallest float).

    Bottoms: scores N x C x S; labels, N x S integers in 0 .. C - 1. Tops: the loss, a scalar;
    optionally the softmax, shaped as the scores, which has no gradient. Labels have none either.

    Fields: softmax_param.axis, the class axis; loss_param.ignore_label, the label of items that are
    ignored; loss_param.normalization, Z: FULL = N S, VALID = items not ignored, BATCH_SIZE = N,
    NONE = 1; the old loss_param.normalize (true = VALID, false = BATCH_SIZE) if normalization is
    not set; PRE_FIXED of R-FCN's Caffe = pre_fixed_normalizer. Z is at least 1. Of SegNet's Caffe:
    weight_by_label_freqs, and class_weighting, once for each class: the loss of an item is
    multiplied by the weight of its label; Z does not change.
    """

    BOTTOMS = (2, 2)
    TOPS = (1, 2)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        scores, labels = bottoms
        param = self.param.loss_param
        self.axis = canonical_axis(self.param.softmax_param.axis, scores)
        check_labels(scores, labels, self.axis, name=self.param.bottom[1])
        self.ignore_label = param.ignore_label if param.HasField("ignore_label") else None
        self.normalization, self.fixed = normalization(param), param.pre_fixed_normalizer
        self.class_weights = self._class_weights(scores[self.axis])
        self.with_softmax = self.top_count() > 1
        return [(), scores][: self.top_count()]

    def _class_weights(self, classes: int) -> Tensor | None:
        """Return the weight of each class, or None."""
        param = self.param.loss_param
        if not param.weight_by_label_freqs:
            return None
        if len(param.class_weighting) != classes:
            raise LayerError(
                f"class_weighting occurs {len(param.class_weighting)} times, expected {classes}: "
                "once for each class"
            )
        return torch.tensor(list(param.class_weighting), device=self.context.device)

    def forward(self, scores: Tensor, label: Tensor) -> Tensor | tuple[Tensor, ...]:
        shape = scores.shape
        outer, classes = math.prod(shape[: self.axis]), shape[self.axis]
        folded = scores.reshape(outer, classes, -1)
        index, ignored = label_indices(label.reshape(outer, 1, -1), classes, self.ignore_label)
        divisor = normalizer(self.normalization, outer, index, ignored, fixed=self.fixed)
        weight = None if self.class_weights is None else self.class_weights.to(scores)[index]
        loss: Tensor
        loss, log_probability = NegativeLogLikelihood.apply(folded, index, ignored, weight, divisor)  # type: ignore[no-untyped-call]
        return (loss, log_probability.exp().reshape(shape)) if self.with_softmax else loss


def normalizer(
    mode: int, items: int, label: Tensor, ignored: Tensor | None, *, fixed: float = 1.0
) -> float | Tensor:
    """Return the divisor of a loss over labels; a tensor where a device counts the ignored ones.

    Args:
        mode: a LossParameter.NormalizationMode.
        items: the batch size in Caffe's sense, the product of the extents before the class axis.
        ignored: the mask of ignored labels.
        fixed: the divisor with PRE_FIXED.
    """
    if mode == LossParameter.PRE_FIXED:
        return max(1.0, fixed)
    if mode == LossParameter.NONE:
        return 1.0
    if mode == LossParameter.BATCH_SIZE:
        return max(1.0, float(items))
    if mode != LossParameter.VALID or ignored is None:
        return max(1.0, float(label.numel()))
    counted = label.numel() - ignored.sum()
    return max(1.0, float(counted)) if device_of(label.device).is_host else counted.clamp(min=1)


def normalization(param: LossParameter) -> int:
    """Return the mode of `param`, from `normalization` or the old `normalize`."""
    if param.HasField("normalize") and not param.HasField("normalization"):
        return LossParameter.VALID if param.normalize else LossParameter.BATCH_SIZE
    return param.normalization
