"""Updates by norms or means of gradients: STORM, WNGrad, AdaGrad with decay, GFtrl, YellowFin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.training.optimizers import FTRL, Ftrl, counted
from poseidon.caffe2.operators.training.sparse_optimizers import gradient_rows, rounds


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
    """Return parameter and sums of FTRL with a group penalty: a column is kept or zero.

    `nz` holds sums of squared and adjusted gradients (last dimension); a fourth input is `alpha`.
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


@dataclass(frozen=True, slots=True)
class _Averages:
    """Moving averages: their decay, and the factor that removes the bias of their start at 0."""

    beta: float
    correction: float

    def move(self, old: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new average, and it without bias."""
        new = self.beta * old + (1 - self.beta) * value
        return new, new * self.correction


@operator("YellowFin", expected="*S, *S, one, one, W, *S, *S, 5, *S, one")
def yellow_fin(
    w: Tensor,
    m: Tensor,
    rate: Tensor,
    mu: Tensor,
    window: Tensor,
    g_average: Tensor,
    squares_average: Tensor,
    memory: Tensor,
    g: Tensor,
    iteration: Tensor,
    *,
    beta: float = 0.999,
    curv_win_width: int = 20,
    epsilon: float = 1e-6,
    nesterov: bool = False,
    zero_debias: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the first eight inputs after a step of momentum SGD and of the tuner.

    The step uses the old averages of rate and momentum; from iteration 2 on these are tuned.

    Args:
        w, m, g: parameter, momentum and gradient.
        rate, mu: averages of learning rate and momentum, one number each.
        window: logarithms of the last `curv_win_width` squared norms of the gradient.
        g_average, squares_average: averages of the gradient and of its square.
        memory: averages of norm, squared norm, the window's least and largest, optimum's distance.
        iteration: the counter, from 1.
        beta: the decay of the averages.
        curv_win_width: the length of the window.
        epsilon: the least value of norms and of the variance.
        nesterov: use Nesterov's momentum.
        zero_debias: remove the bias of the averages.
    """
    number = max(counted(iteration), 1)
    averages = _Averages(beta, 1 / (1 - beta**number) if zero_debias else 1.0)
    moved = mu * m + rate * g
    updated = w - ((1 + mu) * moved - mu * m if nesterov else moved)
    g_average, g_mean = averages.move(g_average, g)
    squares_average, _ = averages.move(squares_average, g * g)
    norms = g.square().sum().clamp(min=epsilon).reshape(1)
    window = window.clone()
    window[(number - 1) % curv_win_width] = norms.log()[0]
    seen = window[: min(curv_win_width, number)]
    old = memory.reshape(5, 1)
    norm_average, _ = averages.move(old[0], norms.sqrt())
    squared_average, squared_mean = averages.move(old[1], norms)
    least_average, least = averages.move(old[2], seen.min())
    most_average, most = averages.move(old[3], seen.max())
    distance_average, distance = averages.move(old[4], norm_average / squared_average)
    if number > 1:
        variance = (squared_mean - g_mean.square().sum()).clamp(min=epsilon)
        least, most = least.exp().clamp(min=epsilon), most.exp().clamp(min=epsilon)
        best_rate, best_mu = _tuned(distance, least, most, variance)
        mu = averages.move(mu, best_mu.reshape(mu.shape))[0]
        rate = averages.move(rate, best_rate.reshape(rate.shape))[0]
    memory = torch.stack(
        (norm_average, squared_average, least_average, most_average, distance_average)
    ).reshape(memory.shape)
    return updated, moved, rate, mu, window, g_average, squares_average, memory


def _tuned(
    distance: Tensor, least: Tensor, most: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return learning rate and momentum of the paper's single-step problem.

    The momentum's root solves a cubic equation (Vieta), or follows the range of curvatures.
    """
    ratio = (most / least).sqrt()
    p = (distance * least).square() / (2 * variance)
    cubed = (-(p.square() + 4 / 27 * p**3).sqrt() - p) / 2
    w = cubed.sign() * cubed.abs() ** (1 / 3)
    root = (w - p / 3 / w + 1).clamp(max=1 - 1e-6)
    mu = torch.maximum(((ratio - 1) / (ratio + 1)).square(), root.square())
    return (1 - mu.sqrt()).square() / least, mu
