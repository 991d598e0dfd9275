"""Activations with parameters, or of more than one element."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.input_shapes import axis_of, check_tensor
from poseidon.caffe2.operators.numeric.arithmetic import differentiable
from poseidon.caffe2.operators.registry import operator

differentiable(
    "Swish",
    lambda x: x * torch.sigmoid(x),
    "I0, O0, GO0",
    lambda x, y, dy: dy * (y + torch.sigmoid(x) * (1 - y)),
)
differentiable(  # x * tanh(log(1 + e^x)) (arXiv 1908.08681)
    "Mish", functional.mish, "I0, O0, GO0", lambda x, y, dy: torch.ops.aten.mish_backward(dy, x)
)
differentiable(  # log(1 + e^x)
    "Softplus",
    lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "O0, GO0",
    lambda y, dy: dy * (1 - torch.exp(-y)),
)


@operator("PRelu", gradient="PReluGradient(O0, GO0, I0, I1) -> GI0, GI1")
def prelu(x: Tensor, slope: Tensor, *, order: str = "NCHW") -> Tensor:
    """Return x, or slope * x where negative; the slope is one number, or one for each channel."""
    return torch.where(x > 0, x, x * _slopes(slope, x, order))


def _slopes(slope: Tensor, x: Tensor, order: str) -> Tensor:
    if slope.numel() == 1:
        return slope.reshape(())
    channels = x.shape[-1 if order == "NHWC" else 1] if x.dim() > 1 else 1
    check_tensor("the slope", slope, (channels,))
    if order == "NHWC":
        return slope
    return slope.reshape(-1, *[1] * (x.dim() - 2))


@operator("PReluGradient")
def prelu_gradient(
    y: Tensor, dy: Tensor, x: Tensor, slope: Tensor, *, order: str = "NCHW"
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the slope."""
    slopes = _slopes(slope, x, order)
    check_tensor("the gradient", dy, tuple(x.shape))
    negative = torch.where(x > 0, 0, dy * x)
    of_slope = negative.sum_to_size(slopes.shape).reshape(slope.shape)
    return torch.where(x > 0, dy, dy * slopes), of_slope


@operator("Elu", gradient="EluGradient(O0, GO0) -> GI0")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return x, or alpha * (e^x - 1) where it is negative."""
    return functional.elu(x, alpha)


@operator("EluGradient", expected="*S, *S")
def elu_gradient(y: Tensor, dy: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(y < 0, dy * (y + alpha), dy)


@operator("Selu", gradient="SeluGradient(O0, GO0) -> GI0")
def selu(
    x: Tensor, *, alpha: float = 1.6732632423543772, scale: float = 1.0507009873554805
) -> Tensor:
    """Return scale * x, or scale * alpha * (e^x - 1) where it is negative."""
    return scale * functional.elu(x, alpha)


@operator("SeluGradient", expected="*S, *S")
def selu_gradient(
    y: Tensor, dy: Tensor, *, alpha: float = 1.6732632423543772, scale: float = 1.0507009873554805
) -> Tensor:
    return dy * torch.where(y > 0, scale, y + alpha * scale)


@operator("Gelu", gradient="GeluGradient(GO0, I0) -> GI0")
def gelu(x: Tensor, *, fast_gelu: bool = False) -> Tensor:
    """Return x times the normal distribution function of x; `fast_gelu` approximates it by tanh."""
    return functional.gelu(x, approximate="tanh" if fast_gelu else "none")


@operator("GeluGradient", expected="*S, *S")
def gelu_gradient(dy: Tensor, x: Tensor, *, fast_gelu: bool = False) -> Tensor:
    way = "tanh" if fast_gelu else "none"
    result: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate=way)
    return result


@operator("HardSigmoid", gradient="HardSigmoidGradient(O0, GO0) -> GI0")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """Return alpha * x + beta, limited to 0 and 1."""
    return (alpha * x + beta).clamp(0, 1)


@operator("HardSigmoidGradient", expected="*S, *S")
def hard_sigmoid_gradient(y: Tensor, dy: Tensor, *, alpha: float = 0.2) -> Tensor:
    return torch.where((y > 0) & (y < 1), alpha * dy, 0)


@operator("ThresholdedRelu", gradient="ThresholdedReluGradient(O0, GO0) -> GI0")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return x, or 0 where it is not above alpha."""
    return torch.where(x > alpha, x, 0)


@operator("ThresholdedReluGradient", expected="*S, *S")
def thresholded_relu_gradient(y: Tensor, dy: Tensor) -> Tensor:
    return torch.where(y > 0, dy, 0)


@operator("ReluN", gradient="ReluNGradient(O0, GO0) -> GI0")
def relu_n(x: Tensor, *, n: float = 6.0) -> Tensor:
    """Return x, limited to 0 and n."""
    return x.clamp(0, n)


@operator("ReluNGradient", expected="*S, *S")
def relu_n_gradient(y: Tensor, dy: Tensor, *, n: float = 6.0) -> Tensor:
    return torch.where((y > 0) & (y < n), dy, 0)


def _softsign_rule(maker: GradientMaker) -> None:
    """Give the gradient the input, which an operator in place has overwritten."""
    if maker.forward.input[0] == maker.forward.output[0]:
        raise RuntimeError("Softsign in place has no gradient: give its output another name")
    maker.op("SoftsignGradient", [maker.I(0), maker.GO(0)], [maker.GI(0)])


@operator("Softsign", gradient=_softsign_rule)
def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|)."""
    return functional.softsign(x)


@operator("SoftsignGradient", expected="*S, *S")
def softsign_gradient(x: Tensor, dy: Tensor) -> Tensor:
    return dy / (1 + x.abs()) ** 2


@operator("Glu")
def glu(x: Tensor, *, dim: int = -1) -> Tensor:
    """Return the first half along a dimension times the sigmoid of the second."""
    axis = axis_of(dim, x.dim())
    if x.shape[axis] % 2:
        raise ValueError(f"the axis {axis} has {x.shape[axis]} values, expected an even number")
    return functional.glu(x, axis)
