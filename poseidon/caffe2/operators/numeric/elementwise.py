"""Functions of single elements: activations and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, operator

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
    return torch.where(y > 0, dy, alpha * dy)


@operator("Scale", gradient="Scale(GO0) -> GI0")
def scale(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


@operator("ScaleBlobs", inputs=(1, ANY))
def scale_blobs(*xs: Tensor, scale: float = 1.0) -> list[Tensor]:
    return [x * scale for x in xs]


@operator("ZeroGradient", gradient="ConstantFill(I0) -> GI0 {value=0.0, ...}")
def zero_gradient(x: Tensor) -> None:
    """Compute nothing; the gradient of the input is zero where nothing else gives one."""
