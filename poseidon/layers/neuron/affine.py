"""Products and sums with a blob that fits part of the bottom's axes: Scale, Bias, Axpy; and Parameter, a bare blob.

Law: the smaller operand covers the axes `axis` .. `axis + its number of axes - 1` of the bottom and is repeated over
all others; a scalar fits anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from poseidon.layers.base import BlobSpec, Layer, LayerError, Shape, canonical_axis, times
from poseidon.layers.fillers import filler_or
from poseidon.layers.registry import register
from poseidon.proto.caffe_pb2 import BiasParameter, FillerParameter, ScaleParameter


def operand_shape(param: ScaleParameter | BiasParameter, bottom: Shape) -> Shape:
    """Shape of the learned operand: `num_axes` extents of the bottom from `axis` on, -1 for all that follow.

    Raises:
        LayerError: the bottom has fewer axes.
    """
    axis, count = canonical_axis(param.axis, bottom), param.num_axes
    if count < -1:
        raise LayerError(f"num_axes is {count}, expected -1 (all that follow), 0 (a scalar) or more")
    if count == -1:
        return bottom[axis:]
    if axis + count > len(bottom):
        raise LayerError(
            f"axis {axis} and num_axes {count} reach past the {len(bottom)} axes of a bottom of shape {times(bottom)}"
        )
    return bottom[axis : axis + count]


def fit(operand: Shape, param: ScaleParameter | BiasParameter, bottom: Shape) -> Shape:
    """Return the operand's shape with ones behind, so that torch repeats it over the bottom.

    Raises:
        LayerError: the operand does not fit the bottom from `axis` on.
    """
    if not operand:
        return ()
    axis = canonical_axis(param.axis, bottom)
    if bottom[axis : axis + len(operand)] != operand:
        raise LayerError(
            f"bottom 1 has shape {times(operand)}, expected {times(bottom[axis : axis + len(operand)])} "
            f"as bottom 0 has from axis {axis} on"
        )
    return operand + (1,) * (len(bottom) - axis - len(operand))


def seen_as(operand: Tensor, fitted: Shape) -> Tensor:
    """Return the operand in its fitted shape. Where it spans the leading axis, that extent may differ from call to call."""
    if operand.dim() == len(fitted):
        return operand
    return operand.view(operand.shape + (1,) * (len(fitted) - operand.dim()))


@register("Scale")
class Scale(Layer):
    """y = x s (+ b), with s repeated over the axes it does not cover.

    Bottoms: x of any shape; s, unless it is learned. Top: shaped as x; may be in place.

    Fields (scale_param): axis; num_axes, of a learned s; filler, 1 by default; bias_term; bias_filler.

    Blobs: s, when there is one bottom; b, shaped as s, with bias_term.
    """

    MAX_BOTTOMS: ClassVar[int | None] = 2
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True
    scale: nn.Parameter
    bias: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, bottom = self.param.scale_param, bottoms[0]
        self.learned = len(bottoms) == 1
        operand = operand_shape(param, bottom) if self.learned else bottoms[1]
        self.fitted = fit(operand, param, bottom)
        self.biased = param.bias_term
        scale = BlobSpec(name="scale", shape=operand, filler=filler_or(param, "filler", 1.0))
        bias = BlobSpec(name="bias", shape=operand, filler=param.bias_filler)
        self.declare(*([scale] if self.learned else []), *([bias] if self.biased else []))
        return [bottom]

    def forward(self, bottom: Tensor, operand: Tensor | None = None) -> Tensor:
        scale = seen_as(self.scale if operand is None else operand, self.fitted)
        if not self.biased:
            return bottom * scale
        return torch.addcmul(seen_as(self.bias, self.fitted), bottom, scale)


@register("Bias")
class Bias(Layer):
    """y = x + b, with b repeated over the axes it does not cover.

    Bottoms: x of any shape; b, unless it is learned. Top: shaped as x; may be in place.

    Fields (bias_param): axis; num_axes, of a learned b; filler, 0 by default.

    Blobs: b, when there is one bottom.
    """

    MAX_BOTTOMS: ClassVar[int | None] = 2
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True
    bias: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, bottom = self.param.bias_param, bottoms[0]
        learned = len(bottoms) == 1
        operand = operand_shape(param, bottom) if learned else bottoms[1]
        self.fitted = fit(operand, param, bottom)
        self.declare(*([BlobSpec(name="bias", shape=operand, filler=param.filler)] if learned else []))
        return [bottom]

    def forward(self, bottom: Tensor, operand: Tensor | None = None) -> Tensor:
        bias = seen_as(self.bias if operand is None else operand, self.fitted)
        return bottom.add_(bias) if self.overwrites_bottom else bottom + bias


@register("Axpy")
class Axpy(Layer):
    """y = a x + z, with one a for each channel of each image. From SENet, Hu et al., 2017.

    Bottoms: a, N x C or N x C x 1 x 1; x, N x C x ... ; z, shaped as x. Top: shaped as x. No fields.
    """

    MIN_BOTTOMS: ClassVar[int] = 3
    MAX_BOTTOMS: ClassVar[int | None] = 3
    TOPS_MAY_BE_OVERWRITTEN: ClassVar[bool] = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, x, z = bottoms
        if len(x) < 2 or a[:2] != x[:2] or any(extent != 1 for extent in a[2:]):
            raise LayerError(f"bottom 0 has shape {times(a)}, expected {times(x[:2])} as bottom 1 begins")
        if x != z:
            raise LayerError(f"bottom 2 has shape {times(z)}, expected {times(x)} as bottom 1")
        self.behind = (1,) * (len(x) - 2)
        return [x]

    def forward(self, a: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return torch.addcmul(z, a.reshape(a.shape[:2] + self.behind), x)


@register("Parameter")
class Parameter(Layer):
    """A learned blob as a top. Has no bottom.

    Top: the blob. Fields (parameter_param): shape.

    Blobs: the blob, of zeros at first.
    """

    MIN_BOTTOMS: ClassVar[int] = 0
    MAX_BOTTOMS: ClassVar[int | None] = 0
    value: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = tuple(self.param.parameter_param.shape.dim)
        if any(extent < 0 for extent in shape):
            raise LayerError(f"shape is {times(shape)}, expected no negative extents")
        self.declare(BlobSpec(name="value", shape=shape, filler=FillerParameter()))
        return [shape]

    def forward(self) -> Tensor:
        return self.value
