"""Classification losses other than SoftmaxWithLoss.

Shape letters: N items, C classes, S axes after the class axis.

Accuracy.

Shape letters: N the axes before the class axis, C classes, S the axes after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from torch import Tensor
from torch.nn import functional

from poseidon.base.foreign_files import read_definition
from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.softmax import check_labels, label_indices, normalization, normalizer
from poseidon.caffe.proto.blob import to_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto, HingeLossParameter, LossParameter

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
        if len(scores) < 2:
            raise LayerError(f"scores have shape {times(scores)}, expected items x classes")
        if math.prod(labels) != scores[0]:
            raise LayerError(
                f"bottom '{self.param.bottom[1]}' has {math.prod(labels)} values, expected "
                f"{scores[0]}: one an item"
            )
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
        p_NC = probability.flatten(1)
        label_N1, _ = label_indices(label.reshape(-1, 1), p_NC.shape[1], None)
        return -log_of(p_NC.gather(1, label_N1)).sum() / p_NC.shape[0]


def log_of(probability: Tensor) -> Tensor:
    """Return log max(p, 1e-20), with the gradient 1 / max(p, 1e-20) also below the threshold, as
    in Caffe.
    """
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
        if len(bottoms) == 3 and math.prod(bottoms[2]) != classes * classes:
            raise LayerError(
                f"bottom 2 has shape {times(bottoms[2])}, expected {classes}x{classes}"
            )
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
                f"bottoms have shapes {times(scores)} and {times(targets)}, expected as many values"
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
