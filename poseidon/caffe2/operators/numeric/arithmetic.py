"""Sums, products and their like, with NumPy's broadcasting or Caffe2's older one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator

Unary = Callable[[Tensor], Tensor]


def unary(name: str, function: Unary, gradient: str | None, module: str) -> None:
    """Register a function of single elements.

    Args:
        name: of the operator.
        function: torch's, or one of ours.
        gradient: the rule of its gradient, None where it is not differentiable.
        module: the one that registers it.
    """

    def forward(x: Tensor) -> Tensor:
        return function(x)

    forward.__module__ = module
    operator(name, gradient=gradient, plain=function)(forward)


def differentiable(
    name: str, function: Unary, inputs: str, gradient: Callable[..., Tensor]
) -> None:
    """Register a function of single elements, and the operator of its gradient.

    Args:
        name: of the operator; `Gradient` behind it is the name of the other one.
        function: torch's, or one of ours.
        inputs: the inputs of the gradient operator, as a rule names them: `I0, GO0`.
        gradient: the gradient, given these inputs; the operators belong to its module.
    """
    unary(name, function, f"{name}Gradient({inputs}) -> GI0", gradient.__module__)
    same = ", ".join("*S" for _ in inputs.split(","))
    operator(f"{name}Gradient", expected=same)(gradient)


# On a CPU threshold_backward is many times as fast as `where`.
differentiable(
    "Relu", torch.relu, "O0, GO0", lambda y, dy: torch.ops.aten.threshold_backward(dy, y, 0)
)
differentiable("Sigmoid", torch.sigmoid, "O0, GO0", lambda y, dy: dy * y * (1 - y))
differentiable("Tanh", torch.tanh, "O0, GO0", lambda y, dy: dy * (1 - y * y))

unary("Exp", torch.exp, "Mul(O0, GO0) -> GI0", __name__)
unary("Log", torch.log, "Div(GO0, I0) -> GI0", __name__)
unary("Sqr", torch.square, "Scale(GO0) -> GO0 {scale=2.0, ...}; Mul(GO0, I0) -> GI0", __name__)
unary("Sqrt", torch.sqrt, "Scale(GO0) -> GI0 {scale=0.5, ...}; Div(GI0, O0) -> GI0", __name__)
unary("Negative", torch.neg, "Negative(GO0) -> GI0", __name__)
unary("Sign", torch.sign, None, __name__)
unary("StopGradient", torch.clone, NO_GRADIENT, __name__)


@operator("LeakyRelu", gradient="LeakyReluGradient(O0, GO0) -> GI0")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """Return x, or alpha * x where it is negative."""
    return functional.leaky_relu(x, alpha)


@operator("LeakyReluGradient", expected="*S, *S")
def leaky_relu_gradient(y: Tensor, dy: Tensor, *, alpha: float = 0.01) -> Tensor:
    return torch.where(y >= 0, dy, alpha * dy)


@operator("Scale", gradient="Scale(GO0) -> GI0")
def scale(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@operator("ScaleBlobs", inputs=(1, ANY))
def scale_blobs(*xs: Tensor, scale: float = 1.0) -> list[Tensor]:
    return [x * scale for x in xs]


@operator("ZeroGradient", gradient="ConstantFill(I0) -> GI0 {value=0.0, ...}")
def zero_gradient(x: Tensor) -> None:
    """Compute nothing; the gradient of the input is zero where nothing else gives one."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The arguments of two operands: how the second gets the shape of the first.

    Attributes:
        broadcast: whether Caffe2's older rule holds: the shape of the second is a part of the shape
            of the first, which begins at `axis`, or is its end. Without it NumPy's rule holds.
        axis: where the part begins; -1 where it is the end.
        axis_str: the axis as a letter of `order` (`C` of `NCHW`), "" where `axis` says it.
        order: the letters of all axes.
    """

    broadcast: bool = False
    axis: int = -1
    axis_str: str = ""
    order: str = "NCHW"

    def fit(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `b` in a shape that broadcasts to the shape of `a`."""
        if not self.broadcast:
            return b
        if b.numel() == 1:
            return b.reshape((1,) * a.dim())
        axis = self.order.index(self.axis_str) if self.axis_str else self.axis
        fitted = b.reshape(b.shape + (1,) * (a.dim() - axis - b.dim())) if axis >= 0 else b
        pairs = zip(reversed(fitted.shape), reversed(a.shape), strict=False)
        if fitted.dim() > a.dim() or any(size not in (1, whole) for size, whole in pairs):
            raise ValueError(
                f"the shape {list(b.shape)} of the second operand is not a part of the first's"
                f" {list(a.shape)}, as broadcast=1 needs"
            )
        return fitted


NUMPY = Broadcast()


def summed_to(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient summed over the axes along which `like` was broadcast."""
    return gradient.sum_to_size(like.shape) if gradient.shape != like.shape else gradient


def binary(
    name: str, function: Callable[[Tensor, Tensor], Tensor], gradient: str | None, module: str
) -> None:
    """Register a function of two operands; the arguments are those of `unary`."""

    def forward(a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY) -> Tensor:
        return function(a, rule.fit(a, b))

    forward.__module__ = module
    operator(name, gradient=gradient, plain=function)(forward)


binary("Add", torch.add, "AddGradient(GO0, I0, I1) -> GI0, GI1", __name__)
binary("Sub", torch.sub, "SubGradient(GO0, I0, I1) -> GI0, GI1", __name__)
binary("Mul", torch.mul, "MulGradient(GO0, I0, I1) -> GI0, GI1", __name__)


@operator("AddGradient")
def add_gradient(
    dy: Tensor, a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY
) -> tuple[Tensor, Tensor]:
    fitted = rule.fit(a, b)
    return summed_to(dy, a), summed_to(dy, fitted).reshape(b.shape)


@operator("SubGradient")
def sub_gradient(
    dy: Tensor, a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY
) -> tuple[Tensor, Tensor]:
    fitted = rule.fit(a, b)
    return summed_to(dy, a), -summed_to(dy, fitted).reshape(b.shape)


@operator("MulGradient")
def mul_gradient(
    dy: Tensor, a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY
) -> tuple[Tensor, Tensor]:
    fitted = rule.fit(a, b)
    return summed_to(dy * fitted, a), summed_to(dy * a, fitted).reshape(b.shape)


@operator("Div", gradient="DivGradient(GO0, I0, I1, O0) -> GI0, GI1")
def div(a: Tensor, b: Tensor, *, rule: Broadcast = NUMPY) -> Tensor:
    """Return a / b; integers are divided as C does."""
    fitted = rule.fit(a, b)
    return a / fitted if a.is_floating_point() else torch.div(a, fitted, rounding_mode="trunc")


@operator("DivGradient", inputs=(3, 4))
def div_gradient(*given: Tensor, rule: Broadcast = NUMPY) -> tuple[Tensor, Tensor]:
    """Return the gradients of `Div`, given dy, a, b, y, or b, y, dy (older, for equal shapes)."""
    dy, a, b, y = given if len(given) == 4 else (given[2], given[1], given[0], given[1])
    fitted = rule.fit(a, b)
    return summed_to(dy / fitted, a), -summed_to(dy * y / fitted, fitted).reshape(b.shape)


@operator("Sum", gradient="GI* = GO0", shapes="*S, ...")
@operator("SumInt", shapes="*S, ...")
def sum_(x: Tensor, *others: Tensor) -> Tensor:
    """Return the sum of all inputs, on the device of the first."""
    if not others:
        return x.clone()
    if x.is_cuda:
        others = tuple(other.to(x.device) for other in others)
    total = x + others[0]
    for other in others[1:]:
        total.add_(other)
    return total


@operator("Copy", gradient="CopyOnDeviceLike(GO0, I0) -> GI0")
class Copy:
    """Copies a tensor of numbers or strings; an operator of a GPU copies to that GPU."""

    def __init__(self, *, context: Context) -> None:
        self.device = context.device if context.device.type == "cuda" else None

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x.copy()
        return x.clone() if self.device is None else x.to(self.device, copy=True)


@operator("CopyOnDeviceLike")
def copy_on_device_like(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.device, copy=True)
