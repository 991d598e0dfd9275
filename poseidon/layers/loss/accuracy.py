"""Accuracy: how often the label is among the highest scores.

Shape letters: N every axis before the class axis, C classes, S every axis after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from poseidon.layers.base import Layer, LayerError, Shape, canonical_axis
from poseidon.layers.common.softmax import check_labels, to_indices
from poseidon.layers.registry import register


@register("Accuracy")
class Accuracy(Layer):
    """The share of items whose label is among the top_k scores.

    An item is right when fewer than top_k other classes score at least as high as its label: a tie counts against it.
    An item ignored counts for nothing; with no items at all the share is 0.

    Bottoms: scores N x C x S; labels, N x S whole numbers in 0 .. C - 1. Tops: the share, a scalar; optionally the
    share of each class, C (0 for a class without items). Nothing here has a gradient.

    Fields (accuracy_param): top_k, axis, ignore_label.
    """

    MIN_BOTTOMS: ClassVar[int] = 2
    MAX_BOTTOMS: ClassVar[int | None] = 2
    MAX_TOPS: ClassVar[int | None] = 2

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        scores, labels = bottoms
        param = self.param.accuracy_param
        self.axis = canonical_axis(param.axis, scores)
        check_labels(scores, labels, self.axis, name=self.param.bottom[1])
        classes = scores[self.axis]
        self.top_k = param.top_k
        if not 1 <= self.top_k <= classes:
            raise LayerError(f"top_k is {self.top_k}, expected 1 to {classes}, the number of classes")
        self.ignore_label = param.ignore_label if param.HasField("ignore_label") else None
        self.per_class = len(self.param.top) > 1
        return [(), (classes,)][: len(self.param.top)]

    @torch.no_grad()
    def forward(self, scores: Tensor, label: Tensor) -> Tensor | tuple[Tensor, ...]:
        outer, classes = math.prod(scores.shape[: self.axis]), scores.shape[self.axis]
        scores_NCS = scores.reshape(outer, classes, -1)
        label_N1S, ignored = to_indices(label.reshape(outer, 1, -1), classes, self.ignore_label)
        of_label = scores_NCS.gather(1, label_N1S)
        # The label's own score is among those counted, hence <=.
        right = (scores_NCS >= of_label).sum(1, keepdim=True) <= self.top_k
        counted = torch.ones_like(right) if ignored is None else ~ignored
        right &= counted
        share = right.sum().to(scores.dtype) / counted.sum().clamp(min=1)
        if not self.per_class:
            return share
        of_class = label_N1S.flatten()
        zeros = torch.zeros(classes, dtype=scores.dtype, device=scores.device)
        hits = zeros.index_add(0, of_class, right.flatten().to(scores.dtype))
        items = zeros.index_add(0, of_class, counted.flatten().to(scores.dtype))
        return share, hits / items.clamp(min=1)
