"""Updates whose learning rate follows the norms of the gradients: STORM, WNGrad, AdaGrad with decay."""

from __future__ import annotations

from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.training.optimizers import counted


@operator("Storm")
def storm(
    w: Tensor, m: Tensor, total: Tensor, g: Tensor, lr: Tensor, *, momentum: float = 10.0, beta: float = 0.1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, momentum and the sum of all squared gradients (arXiv 1905.10018)."""
    summed = total + (g * g).sum()
    rate = lr * (beta + summed) ** (-1 / 3)
    moved = g + (1 - (momentum * rate * rate).clamp(max=1)) * (m - g)
    return w + rate * moved, moved, summed


@operator("Wngrad")
def wngrad(w: Tensor, b: Tensor, g: Tensor, lr: Tensor, *, epsilon: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Return parameter and the divisor of the learning rate, which grows with the squared norm (arXiv 1803.02865)."""
    return w + lr * g / (b + epsilon), b + (g * g).sum() / (b + epsilon)


@operator("DecayAdagrad")
def decay_adagrad(
    w: Tensor,
    m: Tensor,
    h: Tensor,
    g: Tensor,
    lr: Tensor,
    iteration: Tensor,
    *,
    beta1: float = 0.9,
    epsilon: float = 1e-5,
    bias_correction_first: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean of gradients and sum of squares."""
    correction = 1 / (1 - beta1 ** (counted(iteration) + 1)) if bias_correction_first else 1.0
    first, second = beta1 * m + (1 - beta1) * g, h + g * g
    return w + lr * correction * first / (second.sqrt() + epsilon), first, second
