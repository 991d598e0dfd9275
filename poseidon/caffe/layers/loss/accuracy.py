"""Accuracy.

Shape letters: N the axes before the class axis, C classes, S the axes after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis
from poseidon.caffe.layers.common.softmax import check_labels, label_indices
from poseidon.caffe.layers.registry import register


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
