"""Layers that copy, join, divide or discard blobs: Split, Concat, Slice, Eltwise, Silence.

Layers that reduce axes: Reduction, ArgMax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import EltwiseParameter, ReductionParameter


@register("Split")
class Split(Layer):
    """Copies of the bottom.

    The gradients of the tops add up. A definition needs no Split to use a blob twice.

    Bottom: any shape. Tops: one or more of the same shape. No fields.
    """

    takes_any_form = True
    TOPS = (1, None)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]] * len(self.param.top)

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        return (bottom,) * len(self.param.top) if len(self.param.top) > 1 else bottom


@register("Concat")
class Concat(Layer):
    """Concatenation of the bottoms along `axis`.

    Bottoms: one or more, with equal extents on every other axis. Top: their concatenation.

    Fields (concat_param): axis, or the old concat_dim.
    """

    takes_any_form = True
    BOTTOMS = (1, None)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, first = self.param.concat_param, bottoms[0]
        if param.HasField("axis") and param.HasField("concat_dim"):
            raise LayerError("has both axis and concat_dim, expected one of them")
        self.axis = canonical_axis(
            param.concat_dim if param.HasField("concat_dim") else param.axis, first
        )
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if len(shape) != len(first) or without(shape, self.axis) != without(first, self.axis):
                raise LayerError(
                    f"bottom '{name}' has shape {times(shape)}, expected {times(first)} on every "
                    f"axis but {self.axis}"
                )
        joined = sum(shape[self.axis] for shape in bottoms)
        return [(*first[: self.axis], joined, *first[self.axis + 1 :])]

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)


@register("Slice")
class Slice(Layer):
    """Division of the bottom along `axis`, at the slice points or into equal parts.

    Bottom: any shape. Tops: its parts in order.

    Fields (slice_param): axis, or the old slice_dim; slice_point, one fewer than the tops,
    ascending.
    """

    takes_any_form = True
    TOPS = (1, None)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape, parts = self.param.slice_param, bottoms[0], len(self.param.top)
        if param.HasField("axis") and param.HasField("slice_dim"):
            raise LayerError("has both axis and slice_dim, expected one of them")
        self.axis = canonical_axis(
            param.slice_dim if param.HasField("slice_dim") else param.axis, shape
        )
        extent, points = shape[self.axis], list(param.slice_point)
        if not points:
            if extent % parts:
                raise LayerError(
                    f"axis {self.axis} has extent {extent}, expected a multiple of the {parts} tops"
                )
            points = [extent // parts * part for part in range(1, parts)]
        if len(points) != parts - 1:
            raise LayerError(
                f"has {len(points)} slice points for {parts} tops, expected {parts - 1}"
            )
        edges = [0, *points, extent]
        self.extents = [high - low for low, high in pairwise(edges)]
        if min(self.extents) < 1:
            raise LayerError(
                f"slice points {points} must ascend and be inside axis {self.axis} of extent "
                f"{extent}"
            )
        return [(*shape[: self.axis], part, *shape[self.axis + 1 :]) for part in self.extents]

    def forward(self, bottom: Tensor) -> Tensor | tuple[Tensor, ...]:
        parts = torch.split(bottom, self.extents, self.axis)
        return tuple(parts) if len(parts) > 1 else bottom


@register("Eltwise")
class Eltwise(Layer):
    """The element-wise product, weighted sum or maximum of the bottoms.

    Bottoms: two or more of one shape. Top: the same.

    Fields (eltwise_param): operation; coeff, one a bottom, for SUM (MAX does not read it, as in
    Caffe). `stable_prod_grad` selects one of two roundings of the same gradient in Caffe; torch's
    product is the stable one.
    """

    takes_any_form = True
    BOTTOMS = (2, None)
    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.eltwise_param
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if shape != bottoms[0]:
                raise LayerError(
                    f"bottom '{name}' has shape {times(shape)}, expected {times(bottoms[0])} as "
                    "the first"
                )
        if param.coeff and param.operation == EltwiseParameter.PROD:
            raise LayerError("has coeff, but operation: PROD, expected SUM")
        if param.coeff and len(param.coeff) != len(bottoms):
            raise LayerError(
                f"has {len(param.coeff)} coeff for {len(bottoms)} bottoms, expected one each"
            )
        self.operation = param.operation
        self.coefficients = tuple(param.coeff) or (1.0,) * len(bottoms)
        self.is_plain_sum = self.operation == EltwiseParameter.SUM and set(self.coefficients) == {
            1.0
        }
        return [bottoms[0]]

    def forward(self, *bottoms: Tensor) -> Tensor:
        if self.operation == EltwiseParameter.SUM:
            return self._sum(bottoms)
        if self.operation == EltwiseParameter.PROD:
            top = bottoms[0]
            for bottom in bottoms[1:]:
                top = top * bottom
            return top
        # For equal values the gradient goes to the second bottom before the first, and to these two
        # before a later one, as in Caffe. torch.maximum would halve it.
        top = torch.where(bottoms[0] > bottoms[1], bottoms[0], bottoms[1])
        for bottom in bottoms[2:]:
            top = torch.where(bottom > top, bottom, top)
        return top

    def add_into(self, index: int, *bottoms: Tensor) -> Tensor:
        """Compute the plain sum in bottom `index`, which no other layer reads, and return it."""
        top = bottoms[index]
        for other in (*bottoms[:index], *bottoms[index + 1 :]):
            top = top.add_(other)
        return top

    def _sum(self, bottoms: Sequence[Tensor]) -> Tensor:
        first, *others = self.coefficients
        top = bottoms[0] if first == 1 else bottoms[0] * first
        for bottom, coefficient in zip(bottoms[1:], others, strict=True):
            top = torch.add(top, bottom, alpha=coefficient)
        return top


@register("Silence")
class Silence(Layer):
    """A layer that consumes its bottoms, so that they are not outputs of the net.
    Bottoms: one or more. No tops, no fields.
    """

    BOTTOMS = (1, None)
    TOPS = (0, 0)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return []

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:
        return ()


def without(shape: Shape, axis: int) -> Shape:
    """Return the shape with one axis left out."""
    return shape[:axis] + shape[axis + 1 :]


@register("Reduction")
class Reduction(Layer):
    """y = coeff times the sum, the sum of absolute values or squares, or the mean, from `axis` on.

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
            self.choices = shape[self.axis]
        else:
            self.choices = math.prod(shape[1:])
        if not 1 <= self.top_k <= self.choices:
            raise LayerError(f"top_k is {self.top_k}, expected 1 to {self.choices}")
        if self.by_axis:
            return [(*shape[: self.axis], self.top_k, *shape[self.axis + 1 :])]
        # Caffe keeps at least three axes here.
        lead = (*shape[:1], 2 if self.with_values else 1, self.top_k)
        return [(*lead, *(1,) * (max(len(shape), 3) - 3))]

    @torch.no_grad()
    def forward(self, bottom: Tensor) -> Tensor:
        axis = self.axis if self.by_axis else 1
        values = bottom if self.by_axis else bottom.reshape(bottom.shape[0], self.choices)
        # A stable ascending sort, reversed, puts the larger index of equal values first.
        ordered, index = values.sort(dim=axis, stable=True)
        last = ordered.shape[axis] - self.top_k
        ordered = ordered.narrow(axis, last, self.top_k).flip(axis)
        index = index.narrow(axis, last, self.top_k).flip(axis).to(bottom.dtype)
        if self.by_axis:
            return ordered if self.with_values else index
        found = torch.stack((index, ordered), 1) if self.with_values else index.unsqueeze(1)
        return found.reshape(*found.shape, *(1,) * (max(bottom.dim(), 3) - 3))
