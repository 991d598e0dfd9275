"""Layers that change the shape only: Flatten, Reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from poseidon.caffe.layers.base import Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.registry import register


@register("Flatten")
class Flatten(Layer):
    """The bottom with axes `axis` to `end_axis` flattened to one.

    Bottom: any shape. Top: the same values. Fields (flatten_param): axis, end_axis.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.flatten_param, bottoms[0]
        self.first = canonical_axis(param.axis, shape)
        self.last = canonical_axis(param.end_axis, shape, name="end_axis")
        if self.last < self.first:
            raise LayerError(f"end_axis {param.end_axis} is before axis {param.axis}")
        middle = math.prod(shape[self.first : self.last + 1])
        return [(*shape[: self.first], middle, *shape[self.last + 1 :])]

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.flatten(self.first, self.last)


@register("Reshape")
class Reshape(Layer):
    """The bottom with `num_axes` axes from `axis` on replaced by `shape`. 0 copies the bottom's
    extent; -1 is inferred.

    Bottom: any shape. Top: the same values. Fields (reshape_param): shape, axis, num_axes (-1: to
    the last).
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.reshape_param, bottoms[0]
        # In Reshape axis may be the end: -1 means "after the last axis".
        start = param.axis if param.axis >= 0 else len(shape) + param.axis + 1
        if not 0 <= start <= len(shape):
            raise LayerError(
                f"axis {param.axis} is outside the {len(shape)} axes of a bottom of shape "
                f"{times(shape)}"
            )
        end = len(shape) if param.num_axes == -1 else start + param.num_axes
        if not start <= end <= len(shape):
            raise LayerError(
                f"axis {param.axis} with num_axes {param.num_axes} is outside a bottom of shape "
                f"{times(shape)}"
            )
        self.dims, self.start, self.end = tuple(param.shape.dim), start, end
        if self.dims.count(-1) > 1 or min(self.dims, default=0) < -1:
            raise LayerError(f"shape is {list(self.dims)}, expected extents, 0, and at most one -1")
        for index, dim in enumerate(self.dims):
            if dim == 0 and start + index >= len(shape):
                raise LayerError(
                    f"dim {index} is 0 but a bottom of shape {times(shape)} has no axis "
                    f"{start + index}"
                )
        return [self.reshaped(shape)]

    def reshaped(self, shape: Shape) -> Shape:
        """Return the top's shape for a bottom of this shape."""
        middle = [
            shape[self.start + index] if dim == 0 else dim for index, dim in enumerate(self.dims)
        ]
        count = math.prod(shape[self.start : self.end])
        if -1 in middle:
            known = math.prod(extent for extent in middle if extent != -1)
            if known == 0 or count % known:
                raise LayerError(
                    f"{count} values of a bottom of shape {times(shape)} do not divide by {known}"
                )
            middle[middle.index(-1)] = count // known
        if math.prod(middle) != count:
            raise LayerError(
                f"shape {times(middle)} has {math.prod(middle)} values, expected {count} of "
                f"{times(shape)}"
            )
        return (*shape[: self.start], *middle, *shape[self.end :])

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.reshape(self.reshaped(tuple(bottom.shape)))
