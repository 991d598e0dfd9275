"""Functions of single elements: activations and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, operator


@operator("Relu", gradient="ReluGradient(O0, GO0) -> GI0", plain=torch.relu)
def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return torch.relu(x)


@operator("ReluGradient", expected="*S, *S")
def relu_gradient(y: Tensor, dy: Tensor) -> Tensor:
    # on a CPU many times as fast as `where`
    gradient: Tensor = torch.ops.aten.threshold_backward(dy, y, 0)
    return gradient


@operator("Sigmoid", gradient="SigmoidGradient(O0, GO0) -> GI0", plain=torch.sigmoid)
def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


@operator("SigmoidGradient", expected="*S, *S")
def sigmoid_gradient(y: Tensor, dy: Tensor) -> Tensor:
    return dy * y * (1 - y)


@operator("Tanh", gradient="TanhGradient(O0, GO0) -> GI0", plain=torch.tanh)
def tanh(x: Tensor) -> Tensor:
    """Return tanh(x)."""
    return torch.tanh(x)


@operator("TanhGradient", expected="*S, *S")
def tanh_gradient(y: Tensor, dy: Tensor) -> Tensor:
    return dy * (1 - y * y)


@operator("LeakyRelu", gradient="LeakyReluGradient(O0, GO0) -> GI0")
def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """Return x, or alpha * x where it is negative."""
    return functional.leaky_relu(x, alpha)


@operator("LeakyReluGradient", expected="*S, *S")
def leaky_relu_gradient(y: Tensor, dy: Tensor, *, alpha: float = 0.01) -> Tensor:
    """Return the gradient of `LeakyRelu`."""
    return torch.where(y > 0, dy, alpha * dy)


@operator("Exp", gradient="Mul(O0, GO0) -> GI0", plain=torch.exp)
def exp(x: Tensor) -> Tensor:
    """Return e^x."""
    return torch.exp(x)


@operator("Log", gradient="Div(GO0, I0) -> GI0", plain=torch.log)
def log(x: Tensor) -> Tensor:
    """Return the natural logarithm."""
    return torch.log(x)


@operator(
    "Sqr", gradient="Scale(GO0) -> GO0 {scale=2.0, ...}; Mul(GO0, I0) -> GI0", plain=torch.square
)
def sqr(x: Tensor) -> Tensor:
    """Return x * x."""
    return x * x


@operator(
    "Sqrt", gradient="Scale(GO0) -> GI0 {scale=0.5, ...}; Div(GI0, O0) -> GI0", plain=torch.sqrt
)
def sqrt(x: Tensor) -> Tensor:
    """Return the square root."""
    return torch.sqrt(x)


@operator("Negative", gradient="Negative(GO0) -> GI0", plain=torch.neg)
def negative(x: Tensor) -> Tensor:
    """Return -x."""
    return -x


@operator("Scale", gradient="Scale(GO0) -> GI0")
def scale(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return scale * x."""
    return x * scale


@operator("ScaleBlobs", inputs=(1, ANY))
def scale_blobs(*xs: Tensor, scale: float = 1.0) -> list[Tensor]:
    """Return scale * x for each input."""
    return [x * scale for x in xs]


@operator("ZeroGradient", gradient="ConstantFill(I0) -> GI0 {value=0.0, ...}")
def zero_gradient(x: Tensor) -> None:
    """Compute nothing; the gradient of the input is zero where nothing else gives one."""


@operator("StopGradient", gradient=NO_GRADIENT, plain=torch.clone)
def stop_gradient(x: Tensor) -> Tensor:
    """Return x; no gradient flows back."""
    return x.clone()


@operator("Sign")
def sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1."""
    return torch.sign(x)
