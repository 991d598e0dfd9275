"""Layers that reduce axes: Reduction, ArgMax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import ReductionParameter


@register("Reduction")
class Reduction(Layer):
    """y = coeff times the sum, the sum of absolute values or of squares, or the mean, of all
    axes from `axis` on.

    Bottom: any shape. Top: its axes before `axis`; a scalar for axis 0.

    Fields (reduction_param): operation SUM, ASUM, SUMSQ or MEAN; axis; coeff.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.reduction_param, bottoms[0]
        self.axis = canonical_axis(param.axis, shape)
        self.operation, self.coeff = param.operation, param.coeff
        return [shape[: self.axis]]

    def forward(self, bottom: Tensor) -> Tensor:
        values = bottom.flatten(self.axis)
        if self.operation == ReductionParameter.ASUM:
            values = values.abs()
        elif self.operation == ReductionParameter.SUMSQ:
            values = values.square()
        total = values.mean(-1) if self.operation == ReductionParameter.MEAN else values.sum(-1)
        return total if self.coeff == 1 else total * self.coeff


@register("ArgMax")
class ArgMax(Layer):
    """The indices of the top_k largest values, along `axis`, or of each item without `axis`.

    Equal values are ordered by descending index, as in Caffe.

    Bottom: N x ... . Top, by default: N x 1 x top_k, the indices from the largest value down; with
    `out_max_val` N x 2 x top_k, indices above values. With `axis`: the bottom's shape with top_k on
    that axis, holding indices, or values with `out_max_val`. It has no gradient.

    Fields (argmax_param): out_max_val, top_k, axis.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.argmax_param, bottoms[0]
        self.by_axis = param.HasField("axis")
        self.top_k, self.with_values = param.top_k, param.out_max_val
        if self.by_axis:
            self.axis = canonical_axis(param.axis, shape)
            choices = shape[self.axis]
        else:
            choices = math.prod(shape[1:])
        if not 1 <= self.top_k <= choices:
            raise LayerError(f"top_k is {self.top_k}, expected 1 to {choices}")
        if self.by_axis:
            return [(*shape[: self.axis], self.top_k, *shape[self.axis + 1 :])]
        # Caffe keeps at least three axes here.
        lead = (*shape[:1], 2 if self.with_values else 1, self.top_k)
        return [(*lead, *(1,) * (max(len(shape), 3) - 3))]

    @torch.no_grad()
    def forward(self, bottom: Tensor) -> Tensor:
        axis = self.axis if self.by_axis else 1
        values = bottom if self.by_axis else bottom.flatten(1)
        # A stable ascending sort, reversed, puts the larger index of equal values first.
        ordered, index = values.sort(dim=axis, stable=True)
        last = ordered.shape[axis] - self.top_k
        ordered = ordered.narrow(axis, last, self.top_k).flip(axis)
        index = index.narrow(axis, last, self.top_k).flip(axis).to(bottom.dtype)
        if self.by_axis:
            return ordered if self.with_values else index
        found = torch.stack((index, ordered), 1) if self.with_values else index.unsqueeze(1)
        return found.reshape(*found.shape, *(1,) * (max(bottom.dim(), 3) - 3))
