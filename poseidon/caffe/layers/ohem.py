"""Online hard example mining of R-FCN (Dai et al., 2016; Shrivastava et al., 2016): losses by
region, and their choice.

A net computes the loss of every region with `SoftmaxWithLossOHEM` and `SmoothL1LossOHEM`, keeps the
largest with `BoxAnnotatorOHEM`, and learns from the rest of the labels with the usual losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe.layers.base import (
    Layer,
    LayerError,
    Shape,
    check_positive,
    check_shape,
    check_values,
    times,
    without_trailing_ones,
)
from poseidon.caffe.layers.rearrange import INTEGERS, outside
from poseidon.caffe.layers.registry import register
from poseidon.caffe.layers.softmax import (
    LOG_FLT_MIN,
    SoftmaxWithLoss,
    label_indices,
    normalization,
    normalizer,
)
from poseidon.errors import DataError


@register("SoftmaxWithLossOHEM")
class SoftmaxWithLossOHEM(SoftmaxWithLoss):
    """`SoftmaxWithLoss` with a third top: the loss of each item.

    Bottoms: scores N x C x S; labels, N x S integers in 0 .. C - 1. Tops: the loss, a scalar;
    optionally the softmax, shaped as the scores; optionally the loss of each item, shaped as the
    labels, 0 where ignored. Only the loss has a gradient.

    Fields: as for `SoftmaxWithLoss`.
    """

    TOPS = (1, 3)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shapes = super().setup(bottoms)
        return [*shapes, bottoms[1]][: self.top_count()]

    def forward(self, scores: Tensor, label: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = super().forward(scores, label)
        if self.top_count() < 3 or isinstance(found, Tensor):
            return found
        with torch.no_grad():
            classes = scores.shape[self.axis]
            folded = scores.reshape(math.prod(scores.shape[: self.axis]), classes, -1)
            index, ignored = label_indices(
                label.reshape(folded.shape[0], 1, -1), classes, self.ignore_label
            )
            losses = torch.log_softmax(folded, 1).gather(1, index).clamp_(min=LOG_FLT_MIN).neg_()
            if ignored is not None:
                losses.masked_fill_(ignored, 0)
        return (*found, losses.reshape(label.shape))


@register("SmoothL1LossOHEM")
class SmoothL1LossOHEM(Layer):
    """loss = 1/Z sum of f(d), d = w (a - b), f(d) = d^2 / 2 where |d| < 1, else |d| - 1/2.

    Also the loss of each item.

    As in R-FCN's Caffe, the gradient is f'(d) / Z, without a further factor w.

    Bottoms: a and b, N x C (x H x W); optionally weights w; of one shape but for extents of 1 at
    the end. Only a and b have gradients. Tops: the loss, a scalar; optionally the loss of each
    item, N x 1 x H x W, without a gradient.

    Fields (loss_param): normalization, Z: FULL and VALID (the default) = N H W, BATCH_SIZE = N,
    PRE_FIXED = pre_fixed_normalizer, NONE = 1; the old normalize (false = BATCH_SIZE). Z is at
    least 1.
    """

    BOTTOMS = (2, 3)
    TOPS = (1, 2)
    IS_LOSS = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, param = bottoms[0], self.param.loss_param
        plain = without_trailing_ones(shape)
        if not 2 <= len(shape) <= 4 or any(
            without_trailing_ones(other) != plain for other in bottoms
        ):
            raise LayerError(
                f"bottoms have shapes {', '.join(map(times, bottoms))}, expected equal shapes of "
                "2 to 4 axes (NxCxHxW)"
            )
        self.mode, self.fixed = normalization(param), param.pre_fixed_normalizer
        trail = (*shape[2:], 1, 1)[:2]
        return [(), (shape[0], 1, *trail)][: self.top_count()]

    def forward(
        self, a: Tensor, b: Tensor, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        difference = a - b.reshape(a.shape)
        if weights is not None:
            difference = difference + (difference * weights.reshape(a.shape) - difference).detach()
        losses = functional.smooth_l1_loss(
            difference, torch.zeros_like(difference), reduction="none"
        )
        loss = losses.sum() / normalizer(
            self.mode, a.shape[0], losses.select(1, 0), None, fixed=self.fixed
        )
        if self.top_count() < 2:
            return loss
        shape = (a.shape[0], 1, *(*a.shape[2:], 1, 1)[:2])
        return loss, losses.detach().sum(1).reshape(shape)


@register("BoxAnnotatorOHEM")
class BoxAnnotatorOHEM(Layer):
    """The labels and weights of the roi_per_img regions with the largest losses of each image;
    the others are ignored.

    Bottoms: regions R x 5; the loss of each region, R values; labels, R values; weights of the box
    regression, R x C. None has a gradient. Tops: labels R x 1 x 1 x 1, ignore_label for the others;
    weights R x C x 1 x 1, 0 for the others.

    Fields (box_annotator_ohem_param): roi_per_img; ignore_label.
    """

    BOTTOMS = (4, 4)
    TOPS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, (regions, losses, labels, weights) = self.param.box_annotator_ohem_param, bottoms
        check_positive(param, "roi_per_img")
        check_shape("bottom 0", without_trailing_ones(regions), "Rx5", "the regions")
        count = regions[0]
        check_values("bottom 1", losses, count, "region")
        check_values("bottom 2", labels, count, "region")
        check_shape(
            "bottom 3", without_trailing_ones(weights), f"{count}xC", "weights of the regions"
        )
        self.most, self.ignored = param.roi_per_img, param.ignore_label
        return [(count, 1, 1, 1), (count, weights[1], 1, 1)]

    @torch.no_grad()
    def forward(
        self, regions: Tensor, losses: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = regions.shape[0]
        image = regions.reshape(count, -1)[:, 0]
        if wrong := outside(image, range(INTEGERS.stop)):
            raise DataError(f"a region belongs to image {wrong}, expected 0 or more")
        image = image.trunc()
        order = losses.reshape(count).argsort(descending=True, stable=True)
        # The rank of each region among the regions of its image, in the order of losses.
        sorted_image = image[order]
        same = sorted_image.unsqueeze(0) == sorted_image.unsqueeze(1)
        rank = same.tril(-1).sum(1)
        kept = torch.zeros(count, dtype=torch.bool, device=regions.device)
        kept[order[rank < self.most]] = True
        chosen = torch.where(
            kept, labels.reshape(count), torch.full_like(labels.reshape(count), self.ignored)
        )
        flat = weights.reshape(count, -1)
        return chosen.view(count, 1, 1, 1), (flat * kept.unsqueeze(1)).view(count, -1, 1, 1)
