"""Accuracy, and all losses but SoftmaxWithLoss: of classes, and of the distance between two blobs.

Shape letters: N items (the axes before the class axis), C classes, S the axes after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poseidon.base.foreign_files import read_definition
from poseidon.caffe.layers.base import (
    Layer,
    LayerError,
    Shape,
    canonical_axis,
    check_shape,
    check_values,
    times,
    without_trailing_ones,
)
from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.softmax import check_labels, label_indices, normalization, normalizer
from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto, HingeLossParameter, LossParameter
from poseidon.errors import DataError

# Caffe's lower limit of probabilities in logarithms (kLOG_THRESHOLD).
LOG_THRESHOLD = 1e-20


class LabelLoss(Layer):
    """The base class of losses with two bottoms: scores or probabilities, and labels."""

    BOTTOMS = (2, 2)
    IS_LOSS = True


@register("HingeLoss")
class HingeLoss(LabelLoss):
    """loss = 1/N sum over items and classes of max(0, 1 - t x) (L1) or of its square (L2), t = 1
    for the item's class and -1 for others.

    Bottoms: scores N x C...; N labels, integers in 0 .. C - 1 without a gradient. Top: a scalar.

    Fields (hinge_loss_param): norm.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        scores, labels = bottoms
        check_shape("scores", scores, "NxC...", "items x classes")
        check_values(f"bottom '{self.param.bottom[1]}'", labels, scores[0], "item")
        self.squares = self.param.hinge_loss_param.norm == HingeLossParameter.L2
        return [()]

    def forward(self, scores: Tensor, label: Tensor) -> Tensor:
        x_NC = scores.flatten(1)
        label_N1, _ = label_indices(label.reshape(-1, 1), x_NC.shape[1], None)
        sign = torch.ones_like(x_NC, requires_grad=False).scatter_(1, label_N1, -1.0)
        margin = functional.relu(torch.addcmul(sign.new_ones(()), sign, x_NC))
        return (margin.square() if self.squares else margin).sum() / x_NC.shape[0]


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(LabelLoss):
    """loss = -1/N sum of log max(p[label], 1e-20).

    Bottoms: probabilities N x C...; N labels, integers in 0 .. C - 1 without a gradient. Top: a
    scalar. No fields.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        probabilities, labels = bottoms
        if not probabilities or math.prod(labels) != probabilities[0]:
            raise LayerError(
                f"bottoms have shapes {times(probabilities)} and {times(labels)}, expected one "
                "label an item"
            )
        return [()]

    def forward(self, probability: Tensor, label: Tensor) -> Tensor:
        p_NC = probability.reshape(probability.shape[0], math.prod(probability.shape[1:]))
        label_N1, _ = label_indices(label.reshape(-1, 1), p_NC.shape[1], None)
        return -log_of(p_NC.gather(1, label_N1)).sum() / p_NC.shape[0]


def log_of(probability: Tensor) -> Tensor:
    """Return log max(p, 1e-20); its gradient is 1 / max(p, 1e-20) everywhere, as in Caffe."""
    return (
        probability + (probability.detach().clamp(min=LOG_THRESHOLD) - probability.detach())
    ).log()


@register("InfogainLoss")
class InfogainLoss(Layer):
    """loss = -1/Z sum over items and classes of H[label, c] log max(softmax(x)_c, 1e-20).

    Bottoms: scores N x C x S; labels, N x S integers without a gradient; H, C x C, unless `source`
    names it. Tops: the loss, a scalar; optionally the softmax, shaped as the scores.

    Fields: infogain_loss_param.source, a binaryproto of H, and axis; loss_param.ignore_label,
    normalization, normalize as for SoftmaxWithLoss.
    """

    BOTTOMS = (2, 3)
    TOPS = (1, 2)
    IS_LOSS = True
    OPENS_FILES = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        scores, labels = bottoms[:2]
        param, loss = self.param.infogain_loss_param, self.param.loss_param
        self.axis = canonical_axis(param.axis, scores)
        check_labels(scores, labels, self.axis, name=self.param.bottom[1])
        classes = scores[self.axis]
        self.ignore_label = loss.ignore_label if loss.HasField("ignore_label") else None
        self.normalization, self.fixed = normalization(loss), loss.pre_fixed_normalizer
        self.infogain = self._read_infogain(classes) if len(bottoms) < 3 else None
        if len(bottoms) == 3:
            check_values("bottom 2", bottoms[2], classes * classes, "pair of classes")
        self.with_softmax = self.top_count() > 1
        return [(), scores][: self.top_count()]

    def _read_infogain(self, classes: int) -> Tensor:
        source = self.param.infogain_loss_param.source
        if not source:
            raise LayerError(
                "has neither infogain_loss_param source nor a third bottom, expected one of them"
            )
        matrix = read_matrix(self.context.resolve(source))
        if matrix.numel() != classes * classes:
            raise LayerError(
                f"infogain matrix '{source}' has {matrix.numel()} values, expected {classes} x "
                f"{classes}"
            )
        return matrix.reshape(classes, classes).to(self.context.device)

    def forward(
        self, scores: Tensor, label: Tensor, given: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        outer, classes = math.prod(scores.shape[: self.axis]), scores.shape[self.axis]
        folded = scores.reshape(outer, classes, -1)
        label_NS, ignored = label_indices(label.reshape(outer, -1), classes, self.ignore_label)
        source = given if self.infogain is None else self.infogain
        assert source is not None
        rows_NSC = source.detach().reshape(classes, classes)[label_NS]
        if ignored is not None:
            rows_NSC = rows_NSC.masked_fill(ignored.unsqueeze(-1), 0)
        log_p_NCS = torch.log_softmax(folded, 1)
        # The value is limited by Caffe's threshold, the gradient is not.
        limited = log_p_NCS.detach().clamp(min=math.log(LOG_THRESHOLD)) - log_p_NCS.detach()
        total = -(rows_NSC.transpose(1, 2) * (log_p_NCS + limited)).sum()
        loss = total / normalizer(self.normalization, outer, label_NS, ignored, fixed=self.fixed)
        if not self.with_softmax:
            return loss
        return loss, log_p_NCS.detach().exp().reshape(scores.shape)


def read_matrix(path: Path) -> Tensor:
    """Read a matrix from a binaryproto file.

    Raises:
        LayerError: the file is missing or does not hold a blob.
    """
    blob = BlobProto()
    try:
        blob.ParseFromString(read_definition(path))
        return torch.from_numpy(to_array(blob))
    except OSError as error:
        raise LayerError(f"cannot read '{path}': {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise LayerError(f"'{path}' is not a binaryproto of one blob: {error}") from error


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(LabelLoss):
    """loss = -1/Z sum of t log p + (1 - t) log(1 - p), with p = 1 / (1 + exp(-x)).

    Bottoms: scores x; targets t, as many values in 0 .. 1, without a gradient. Top: a scalar.

    Fields (loss_param): ignore_label, a target that is ignored; normalization, Z: FULL = all
    values, VALID = those not ignored, BATCH_SIZE = the first extent (the default of this layer),
    NONE = 1; the old normalize (true = VALID, false = BATCH_SIZE). Z is at least 1.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        (scores, targets), loss = bottoms, self.param.loss_param
        if not scores or math.prod(scores) != math.prod(targets):
            raise LayerError(
                f"bottoms have shapes {times(scores)} and {times(targets)}, expected the same "
                "number of values"
            )
        self.ignore_label = loss.ignore_label if loss.HasField("ignore_label") else None
        is_set = loss.HasField("normalization") or loss.HasField("normalize")
        self.normalization = normalization(loss) if is_set else LossParameter.BATCH_SIZE
        self.fixed = loss.pre_fixed_normalizer
        return [()]

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        target = target.detach().reshape(scores.shape)
        losses = functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
        ignored = None
        if self.ignore_label is not None:
            # As in Caffe, the target is truncated first.
            ignored = target.trunc() == self.ignore_label
            losses = losses.masked_fill(ignored, 0)
        return losses.sum() / normalizer(
            self.normalization, scores.shape[0], target, ignored, fixed=self.fixed
        )


@register("Accuracy")
class Accuracy(Layer):
    """The fraction of items whose label is among the top_k scores.

    An item is correct if fewer than top_k other classes score at least as high as its label, so
    ties count against it. Ignored items do not count; without any items the accuracy is 0.

    Bottoms: scores N x C x S; labels, N x S integers in 0 .. C - 1. Tops: the accuracy, a scalar;
    optionally the accuracy of each class, C (0 for a class without items). No gradient.

    Fields (accuracy_param): top_k, axis, ignore_label.
    """

    BOTTOMS = (2, 2)
    TOPS = (1, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        scores, labels = bottoms
        param = self.param.accuracy_param
        self.axis = canonical_axis(param.axis, scores)
        check_labels(scores, labels, self.axis, name=self.param.bottom[1])
        classes = scores[self.axis]
        self.top_k = param.top_k
        if not 1 <= self.top_k <= classes:
            raise LayerError(
                f"top_k is {self.top_k}, expected 1 to {classes}, the number of classes"
            )
        self.ignore_label = param.ignore_label if param.HasField("ignore_label") else None
        self.per_class = len(self.param.top) > 1
        return [(), (classes,)][: len(self.param.top)]

    @torch.no_grad()
    def forward(self, scores: Tensor, label: Tensor) -> Tensor | tuple[Tensor, ...]:
        outer, classes = math.prod(scores.shape[: self.axis]), scores.shape[self.axis]
        scores_NCS = scores.reshape(outer, classes, -1)
        label_N1S, ignored = label_indices(label.reshape(outer, 1, -1), classes, self.ignore_label)
        of_label = scores_NCS.gather(1, label_N1S)
        # The label's own score is counted too, hence <=.
        correct = (scores_NCS >= of_label).sum(1, keepdim=True) <= self.top_k
        counted = torch.ones_like(correct) if ignored is None else ~ignored
        correct &= counted
        accuracy = correct.sum().to(scores.dtype) / counted.sum().clamp(min=1)
        if not self.per_class:
            return accuracy
        of_class = label_N1S.flatten()
        zeros = torch.zeros(classes, dtype=scores.dtype, device=scores.device)
        hits = zeros.index_add(0, of_class, correct.flatten().to(scores.dtype))
        items = zeros.index_add(0, of_class, counted.flatten().to(scores.dtype))
        return accuracy, hits / items.clamp(min=1)


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
        check_values("bottom 2", similar, a[0], "pair")
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
