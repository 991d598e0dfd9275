"""Updates that look at norms or means of gradients: STORM, WNGrad, AdaGrad with decay, FTRL with
groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.sparse.sparse_rows import gradient_rows, rounds
from poseidon.caffe2.operators.training.optimizers import FTRL, Ftrl, counted


@dataclass(frozen=True, slots=True)
class Storm:
    """The arguments of STORM (arXiv 1905.10018)."""

    momentum: float = 10.0
    beta: float = 0.1

    def rate(self, total: Tensor, g: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of all squared gradients and the learning rate that follows from it."""
        summed = total + (g * g).sum()
        return summed, lr * (self.beta + summed) ** (-1 / 3)

    def moved(self, m: Tensor, g: Tensor, rate: Tensor) -> Tensor:
        """Return the new momentum."""
        return g + (1 - self.momentum * rate * rate) * (m - g)


STORM = Storm()


@operator("Storm", shapes="*S, *S, one, *S, one")
def storm(
    w: Tensor, m: Tensor, total: Tensor, g: Tensor, lr: Tensor, *, rule: Storm = STORM
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, momentum and the sum of all squared gradients."""
    summed, rate = rule.rate(total, g, lr)
    moved = rule.moved(m, g, rate)
    return w + rate * moved, moved, summed


@operator("SparseStorm", expected="N *S, N *S, one, ?, ?, one")
def sparse_storm(
    w: Tensor,
    m: Tensor,
    total: Tensor,
    g: Tensor,
    indices: Tensor,
    lr: Tensor,
    *,
    rule: Storm = STORM,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `Storm` does; the rows without a gradient stay as they are."""
    summed, rate = rule.rate(total, g, lr)
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        m[rows] = rule.moved(m[rows], given[positions], rate)
        w[rows] += rate * m[rows]
    return w, m, summed


@operator("Wngrad", shapes="*S, one, *S, one")
def wngrad(
    w: Tensor, b: Tensor, g: Tensor, lr: Tensor, *, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return parameter, divisor of the learning rate, effective learning rate and update.

    The divisor grows with the squared norm of the gradients (arXiv 1803.02865).
    """
    rate = lr / (b + epsilon)
    step = rate * g
    return w + step, b + (g * g).sum() / (b + epsilon), rate, step


@operator("SparseWngrad", expected="N *, one, ?, ?, one")
def sparse_wngrad(
    w: Tensor, b: Tensor, indices: Tensor, g: Tensor, lr: Tensor, *, epsilon: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return parameter and divisor; the rows without a gradient stay as they are.

    As in Caffe2, the growth of the divisor does not include `epsilon`.
    """
    rate = lr / (b + epsilon)
    given = gradient_rows(g, indices, w)
    for rows, positions in rounds(indices):
        w[rows] += rate * given[positions]
    return w, b + (g * g).sum() / b


@operator("GFtrl", shapes="*S, *S 2, *S, one")
def gftrl(
    w: Tensor, nz: Tensor, g: Tensor, rate: Tensor | None = None, *, rule: Ftrl = FTRL
) -> tuple[Tensor, Tensor]:
    """Return parameter and sums of FTRL with a penalty for groups: a column of weights is kept
    or zero as a whole.

    `nz` holds the sums of squared and of adjusted gradients in its last dimension; a fourth input
    takes the place of `alpha`.
    """
    speed: Any = rule.alpha if rate is None else rate.reshape(())
    n, z = nz.unbind(-1)
    summed = n + g * g
    adjusted = z + g - (summed.sqrt() - n.sqrt()) / speed * w
    limit = rule.lambda1 * len(w) ** 0.5
    norms = adjusted.reshape(len(w), -1).norm(dim=0) + 1e-6
    norms = norms.expand(len(w), -1).reshape(w.shape)
    kept = adjusted * (limit / norms - 1) / ((rule.beta + summed.sqrt()) / speed + rule.lambda2)
    return torch.where(norms > limit, kept, 0.0), torch.stack([summed, adjusted], -1)


@operator("DecayAdagrad", shapes="*S, *S, *S, *S, one, one")
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
    weight_decay: float = 0.0,
    bias_correction_first: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter, mean of gradients and sum of squares."""
    correction = 1 / (1 - beta1 ** (counted(iteration) + 1)) if bias_correction_first else 1.0
    first, second = beta1 * m + (1 - beta1) * g, h + g * g
    step = correction * first / (second.sqrt() + epsilon) + weight_decay * w
    return w + lr * step, first, second
