"""Elementary functions: AbsVal, Power, Exp, Log."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.caffe.layers.base import LayerError, Shape
from poseidon.caffe.layers.neuron.activation import Activation
from poseidon.caffe.layers.registry import register

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
