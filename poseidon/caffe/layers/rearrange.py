"""Layers that select, repeat or reorder parts of a blob (BatchReindex, Crop, Filter, Tile,
ShuffleChannel) or change the shape only (Flatten, Reshape), and values that are indices.

Law: an index (a label, an item of a batch, the image of a region) is truncated to an integer, as by Caffe's cast. It must be finite: C leaves the cast of
other values undefined. Values are checked on the CPU only, because a GPU would have to be
synchronized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import (
    Layer,
    LayerError,
    Shape,
    canonical_axis,
    check_positive,
    check_shape,
    times,
)
from poseidon.caffe.layers.registry import register
from poseidon.errors import DataError

INTEGERS = range(-(2**31), 2**31)
"""The values of Caffe's int."""


def to_indices(values: Tensor, count: int) -> Tensor:
    """Convert values to indices.

    Raises:
        DataError: a value is outside 0 .. count - 1.
    """
    if wrong := outside(values, range(count)):
        raise DataError(f"index {wrong} is outside 0..{count - 1}")
    return values.detach().long()


def outside(values: Tensor, within: range) -> str:
    """Return a value, for messages, whose integer is outside a range or that is not finite.

    Returns:
        "" if there is none, or if the values are not on the CPU.
    """
    if values.device.type != "cpu" or not values.numel():
        return ""
    low, high = (float(value) for value in torch.aminmax(values.detach()))
    # Both are NaN if any value is.
    if low > within.start - 1 and high < within.stop:
        return ""
    wrong = high if high >= within.stop else low
    return f"{wrong:.0f}" if wrong.is_integer() else f"{wrong:g}"


@register("BatchReindex")
class BatchReindex(Layer):
    """y_i = x_(p_i): items of the batch, selected by indices.

    Bottoms: x, N x ...; p, M integers in 0 .. N - 1, which have no gradient. Top: M x ... . No
    fields.
    """

    BOTTOMS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        x, index = bottoms
        check_shape("bottom 0", x, "N...", "items along a first axis")
        check_shape("bottom 1", index, "M", "one axis of indices")
        return [(index[0], *x[1:])]

    def forward(self, bottom: Tensor, index: Tensor) -> Tensor:
        return bottom.index_select(0, to_indices(index, bottom.shape[0]))


@register("Filter")
class Filter(Layer):
    """The items of every other bottom whose selector is not 0.

    Bottoms: one or more of N x ..., then the selector, N (N x 1 x ... ) of zeros and others; it has
    no gradient. Tops: one a bottom but the selector, M x ..., with M >= 0 the selected items of
    this pass. No fields.
    """

    BOTTOMS = (2, None)
    TOPS = (1, None)
    TOPS_MAY_CHANGE_SHAPE = True

    def check_counts(self) -> None:
        super().check_counts()
        if len(self.param.top) != len(self.param.bottom) - 1:
            raise LayerError(
                f"has {len(self.param.top)} tops, expected {len(self.param.bottom) - 1}: one a "
                "bottom but the selector"
            )
        for bottom, top in zip(self.param.bottom, self.param.top, strict=False):
            if bottom == top:
                raise LayerError(
                    f"runs in place on '{top}', whose shape it changes; give the top a different "
                    "name"
                )

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        *items, selector = bottoms
        if not selector or any(extent != 1 for extent in selector[1:]):
            raise LayerError(
                f"selector has shape {times(selector)}, expected one value for each item of the "
                "batch"
            )
        for name, shape in zip(self.param.bottom, items, strict=False):
            if not shape or shape[0] != selector[0]:
                raise LayerError(
                    f"bottom '{name}' has shape {times(shape)}, expected {selector[0]} items as "
                    "in the selector"
                )
        return list(items)

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        *items, selector = bottoms
        chosen = selector.detach().flatten().nonzero().flatten()
        tops = tuple(item.index_select(0, chosen) for item in items)
        return tops if len(tops) > 1 else tops[0]


@register("Crop")
class Crop(Layer):
    """A part of x with the extents of a second blob from `axis` on.

    Bottoms: x; a blob with as many axes, without a gradient. Top: the part of x.

    Fields (crop_param): axis, the first to crop; offset, the start of the part: none
    (0), one for all cropped axes, or one each.
    """

    BOTTOMS = (2, 2)

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, (shape, like) = self.param.crop_param, bottoms
        axis = canonical_axis(param.axis, shape)
        if len(like) != len(shape):
            raise LayerError(
                f"bottoms have shapes {times(shape)} and {times(like)}, expected the same number "
                "of axes"
            )
        cropped = len(shape) - axis
        if len(param.offset) > 1 and len(param.offset) != cropped:
            raise LayerError(
                f"offset occurs {len(param.offset)} times, expected once, or {cropped} times: once "
                f"for each axis from {axis} on"
            )
        offsets = list(param.offset) or [0]
        self.axis = axis
        self.offsets = offsets * (cropped if len(offsets) == 1 else 1)
        self.extents = like[axis:]
        for dim, (offset, extent) in enumerate(zip(self.offsets, self.extents, strict=True), axis):
            if offset + extent > shape[dim]:
                raise LayerError(
                    f"offset {offset} and extent {extent} exceed axis {dim} of a bottom of shape "
                    f"{times(shape)}"
                )
        return [(*shape[:axis], *self.extents)]

    def forward(self, bottom: Tensor, like: Tensor) -> Tensor:
        for dim, offset in enumerate(self.offsets, self.axis):
            bottom = bottom.narrow(dim, offset, like.shape[dim])
        return bottom


@register("Tile")
class Tile(Layer):
    """The bottom, repeated `tiles` times along `axis`.

    Bottom: any shape. Top: `tiles` times as long on that axis. Fields (tile_param): axis, tiles.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, shape = self.param.tile_param, bottoms[0]
        self.axis = canonical_axis(param.axis, shape)
        check_positive(param, "tiles")
        self.repeats = tuple(param.tiles if axis == self.axis else 1 for axis in range(len(shape)))
        return [tuple(extent * count for extent, count in zip(shape, self.repeats, strict=True))]

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.repeat(self.repeats)


@register("ShuffleChannel")
class ShuffleChannel(Layer):
    """The channels of `group` groups, interleaved (ShuffleNet, Zhang et al., 2017).

    Bottom: N x C x ... . Top: the same shape. Fields (shuffle_channel_param): group, which divides
    C.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, self.group = bottoms[0], self.param.shuffle_channel_param.group
        check_shape("bottom", shape, "NxC...", "channels along axis 1")
        if self.group < 1 or shape[1] % self.group:
            raise LayerError(
                f"group is {self.group}, expected a divisor of the {shape[1]} channels"
            )
        return [shape]

    def forward(self, bottom: Tensor) -> Tensor:
        grouped: Tensor = bottom.unflatten(1, (self.group, -1))
        return grouped.transpose(1, 2).flatten(1, 2)


@register("Flatten")
class Flatten(Layer):
    """The bottom with axes `axis` to `end_axis` flattened to one.

    Bottom: any shape. Top: the same values. Fields (flatten_param): axis, end_axis.
    """

    takes_any_form = True

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

    takes_any_form = True

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
