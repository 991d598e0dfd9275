"""YellowFin: momentum SGD that tunes its learning rate and momentum (arXiv 1706.03471)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import operator
from poseidon.caffe2.operators.training.optimizers import counted


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

    The step uses the old averages of rate and momentum. From the second iteration on they follow
    the tuner.

    Args:
        w, m, g: parameter, momentum and gradient.
        rate, mu: averages of learning rate and momentum, one number each.
        window: logarithms of the last `curv_win_width` squared norms of the gradient.
        g_average, squares_average: averages of the gradient and of its square.
        memory: averages of norm, squared norm, smallest and largest of the window, distance to the
            optimum.
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

    The root of the momentum solves a cubic equation (by Vieta's substitution), or is larger where
    the range of curvatures asks for it.
    """
    ratio = (most / least).sqrt()
    p = (distance * least).square() / (2 * variance)
    cubed = (-(p.square() + 4 / 27 * p**3).sqrt() - p) / 2
    w = cubed.sign() * cubed.abs() ** (1 / 3)
    root = (w - p / 3 / w + 1).clamp(max=1 - 1e-6)
    mu = torch.maximum(((ratio - 1) / (ratio + 1)).square(), root.square())
    return (1 - mu.sqrt()).square() / least, mu
