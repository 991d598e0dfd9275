"""Elementary functions (AbsVal, Power, Exp, Log), and layers that multiply and add broadcast
operands: Scale, Bias, Axpy; and Parameter, a learned blob as a top.

Law: the smaller operand covers the axes `axis` .. `axis + its number of axes - 1` of the bottom and
is broadcast over all others. A scalar is broadcast over all axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from poseidon.caffe.layers.activation import Activation
from poseidon.caffe.layers.base import BlobSpec, Layer, LayerError, Shape, canonical_axis, times
from poseidon.caffe.layers.fillers import filler_or
from poseidon.caffe.layers.registry import register
from poseidon.caffe.proto.caffe_pb2 import BiasParameter, FillerParameter, ScaleParameter

# Caffe's value for base e.
NATURAL = -1.0


@register("AbsVal")
class AbsVal(Activation):
    """y = |x|.

    The slope at 0 is 0. Bottom: any shape. Top: the same shape, with another name. No fields.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if self.param.top[0] == self.param.bottom[0]:
            raise LayerError(
                f"cannot run in place; name its top differently than '{self.param.top[0]}'"
            )
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.abs()


@register("Power")
class Power(Activation):
    """y = (shift + scale x)^power; a constant if scale or power is 0 (0^0 = 1).

    Bottom: any shape. Top: the same. Fields (power_param): power, scale, shift.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.power_param
        self.power, self.scale, self.shift = param.power, param.scale, param.shift
        self.constant = float(torch.tensor(self.shift).pow(self.power))
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        if self.power == 0 or self.scale == 0:
            # x^0 is 1 for every x, with a zero gradient rather than none.
            return bottom.pow(0).mul_(self.constant)
        inner, in_place = bottom, self.overwrites_bottom
        if self.scale != 1:
            inner, in_place = (inner.mul_(self.scale) if in_place else inner * self.scale), True
        if self.shift != 0:
            inner = inner.add_(self.shift) if in_place else inner + self.shift
        if self.power != 1:
            return inner.pow(self.power)
        # Not the bottom itself, because the layer above may overwrite the top.
        return inner if in_place or inner is not bottom else bottom.clone()


@register("Exp")
class Exp(Activation):
    """y = base^(shift + scale x); base -1 means e.

    Bottom: any shape. Top: the same. Fields (exp_param): base, scale, shift.
    """

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.exp_param
        rate = natural_log(param.base)
        try:
            self.inner, self.outer = rate * param.scale, math.exp(rate * param.shift)
        except OverflowError as error:
            raise LayerError(f"base^shift overflows: shift is {param.shift:g}") from error
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        top = torch.exp(bottom if self.inner == 1 else bottom * self.inner)
        return top if self.outer == 1 else top * self.outer


@register("Log")
class Log(Activation):
    """y = log(shift + scale x) to the base; base -1 means e.

    Bottom: any shape. Top: the same. Fields (log_param): base, scale, shift.
    """

    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param = self.param.log_param
        rate = natural_log(param.base)
        if rate == 0:
            raise LayerError("base is 1, expected a different positive number, or -1 for e")
        self.scale, self.shift, self.outer = param.scale, param.shift, 1 / rate
        return super().setup(bottoms)

    def forward(self, bottom: Tensor) -> Tensor:
        inner = bottom if self.scale == 1 else bottom * self.scale
        inner = inner if self.shift == 0 else inner + self.shift
        top = inner.log()
        return top if self.outer == 1 else top.mul_(self.outer)


def natural_log(base: float) -> float:
    """Return the natural logarithm of a base of a definition.

    Raises:
        LayerError: the base is neither -1 nor positive and finite.
    """
    if base == NATURAL:
        return 1.0
    if not 0 < base < math.inf:
        raise LayerError(f"base is {base:g}, expected a positive number, or -1 for e")
    return math.log(base)


def operand_shape(param: ScaleParameter | BiasParameter, bottom: Shape) -> Shape:
    """Return the learned operand's shape: `num_axes` extents from `axis` on, -1 for all.

    Raises:
        LayerError: the bottom has fewer axes.
    """
    axis, count = canonical_axis(param.axis, bottom), param.num_axes
    if count < -1:
        raise LayerError(
            f"num_axes is {count}, expected -1 (all axes from axis on), 0 (a scalar) or more"
        )
    if count == -1:
        return bottom[axis:]
    if axis + count > len(bottom):
        raise LayerError(
            f"axis {axis} and num_axes {count} exceed the {len(bottom)} axes of a bottom of shape "
            f"{times(bottom)}"
        )
    return bottom[axis : axis + count]


def broadcast_shape(operand: Shape, param: ScaleParameter | BiasParameter, bottom: Shape) -> Shape:
    """Return the operand's shape with trailing ones, so that torch broadcasts it over the bottom.

    Raises:
        LayerError: the operand's shape differs from the bottom's from `axis` on.
    """
    if not operand:
        return ()
    axis = canonical_axis(param.axis, bottom)
    if bottom[axis : axis + len(operand)] != operand:
        raise LayerError(
            f"bottom 1 has shape {times(operand)}, expected "
            f"{times(bottom[axis : axis + len(operand)])} as in bottom 0 from axis {axis} on"
        )
    return operand + (1,) * (len(bottom) - axis - len(operand))


def broadcast_view(operand: Tensor, broadcast: Shape) -> Tensor:
    """Return a view of the operand in its broadcast shape.

    The extent of a leading axis may change between calls.
    """
    if operand.dim() == len(broadcast):
        return operand
    return operand.view(operand.shape + (1,) * (len(broadcast) - operand.dim()))


@register("Scale")
class Scale(Layer):
    """y = x s (+ b), with s broadcast.

    Bottoms: x of any shape; s, unless it is learned. Top: the shape of x; may be in place.

    Fields (scale_param): axis; num_axes, of a learned s; filler, 1 by default; bias_term;
    bias_filler.

    Blobs: s, if there is one bottom; b, in the shape of s, with bias_term.
    """

    BOTTOMS = (1, 2)
    TOPS_MAY_BE_OVERWRITTEN = True
    scale: nn.Parameter
    bias: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, bottom = self.param.scale_param, bottoms[0]
        self.learned = len(bottoms) == 1
        operand = operand_shape(param, bottom) if self.learned else bottoms[1]
        self.broadcast = broadcast_shape(operand, param, bottom)
        self.biased = param.bias_term
        scale = BlobSpec(name="scale", shape=operand, filler=filler_or(param, "filler", 1.0))
        bias = BlobSpec(name="bias", shape=operand, filler=param.bias_filler)
        self.declare(*([scale] if self.learned else []), *([bias] if self.biased else []))
        return [bottom]

    def forward(self, bottom: Tensor, operand: Tensor | None = None) -> Tensor:
        scale = broadcast_view(self.scale if operand is None else operand, self.broadcast)
        if not self.biased:
            return bottom * scale
        return torch.addcmul(broadcast_view(self.bias, self.broadcast), bottom, scale)


@register("Bias")
class Bias(Layer):
    """y = x + b, with b broadcast.

    Bottoms: x of any shape; b, unless it is learned. Top: the shape of x; may be in place.

    Fields (bias_param): axis; num_axes, of a learned b; filler, 0 by default.

    Blobs: b, if there is one bottom.
    """

    BOTTOMS = (1, 2)
    TOPS_MAY_BE_OVERWRITTEN = True
    bias: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        param, bottom = self.param.bias_param, bottoms[0]
        learned = len(bottoms) == 1
        operand = operand_shape(param, bottom) if learned else bottoms[1]
        self.broadcast = broadcast_shape(operand, param, bottom)
        self.declare(
            *([BlobSpec(name="bias", shape=operand, filler=param.filler)] if learned else [])
        )
        return [bottom]

    def forward(self, bottom: Tensor, operand: Tensor | None = None) -> Tensor:
        bias = broadcast_view(self.bias if operand is None else operand, self.broadcast)
        return bottom.add_(bias) if self.overwrites_bottom else bottom + bias


@register("Axpy")
class Axpy(Layer):
    """y = a x + z, with one a for each channel of each image. From SENet, Hu et al., 2017.

    Bottoms: a, N x C or N x C x 1 x 1; x, N x C x ... ; z, in the shape of x. Top: the shape of x.
    No fields.
    """

    BOTTOMS = (3, 3)
    TOPS_MAY_BE_OVERWRITTEN = True

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, x, z = bottoms
        if len(x) < 2 or a[:2] != x[:2] or any(extent != 1 for extent in a[2:]):
            raise LayerError(
                f"bottom 0 has shape {times(a)}, expected {times(x[:2])}, the first two extents "
                "of bottom 1"
            )
        if x != z:
            raise LayerError(f"bottom 2 has shape {times(z)}, expected {times(x)} as bottom 1")
        self.trailing = (1,) * (len(x) - 2)
        return [x]

    def forward(self, a: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return torch.addcmul(z, a.reshape(a.shape[:2] + self.trailing), x)


@register("Parameter")
class Parameter(Layer):
    """A learned blob as a top, without bottoms.

    Top: the blob. Fields (parameter_param): shape.

    Blobs: the blob, initially zeros.
    """

    BOTTOMS = (0, 0)
    value: nn.Parameter

    def setup(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = tuple(self.param.parameter_param.shape.dim)
        if any(extent < 0 for extent in shape):
            raise LayerError(f"shape is {times(shape)}, expected no negative extents")
        self.declare(BlobSpec(name="value", shape=shape, filler=FillerParameter()))
        return [shape]

    def forward(self) -> Tensor:
        return self.value
