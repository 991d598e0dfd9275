"""YellowFin: three steps of a vector against the algorithm of the paper, in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, numbers, run

BETA, WINDOW, EPSILON = 0.9, 2, 1e-6


class Tuner:
    """Algorithms 1 to 4 of the paper, with the real root of the cubic equation from numpy."""

    def __init__(self) -> None:
        self.steps = 0
        self.averages: dict[str, Array] = {}
        self.norms: list[float] = []
        self.rate, self.mu = 1.0, 0.0

    def average(self, name: str, value: Array | float) -> Array:
        self.averages[name] = np.asarray(
            BETA * self.averages.get(name, np.zeros(())) + (1 - BETA) * np.asarray(value)
        )
        return self.averages[name] / (1 - BETA**self.steps)

    def see(self, g: Array) -> None:
        self.steps += 1
        squared = float((g * g).sum())
        self.norms = [*self.norms, np.log(squared)][-WINDOW:]
        mean, squares = self.average("g", g), self.average("squared", squared)
        self.average("norm", squared**0.5)
        least, most = (
            np.exp(self.average(name, limit(self.norms)))
            for name, limit in (("min", min), ("max", max))
        )
        distance = self.average("distance", self.averages["norm"] / self.averages["squared"])
        if self.steps == 1:
            return
        variance = max(squares - (mean * mean).sum(), EPSILON)
        # The root of p x = (1 - x)^3 between 0 and 1, with p = (D h_min)^2 / (2 C).
        p = float((distance * least) ** 2 / (2 * variance))
        root = next(
            r.real
            for r in np.roots([-1, 3, -(3 + p), 1])
            if abs(r.imag) < 1e-9  # (1 - x)^3 - p x
        )
        ratio = (most / least) ** 0.5
        mu = max(root**2, ((ratio - 1) / (ratio + 1)) ** 2)
        self.mu = BETA * self.mu + (1 - BETA) * mu
        self.rate = BETA * self.rate + (1 - BETA) * (1 - mu**0.5) ** 2 / least


@pytest.mark.parametrize("nesterov", [0, 1])
def test_three_steps(nesterov: int) -> None:
    w, m, tuner = numbers(4), np.zeros(4, "float32"), Tuner()
    state = [
        w,
        m,
        np.ones(1, "float32"),
        np.zeros(1, "float32"),
        np.zeros(WINDOW, "float32"),
        np.zeros(4, "float32"),
        np.zeros(4, "float32"),
        np.zeros(5, "float32"),
    ]
    for step in range(1, 5):
        g = numbers(4, seed=step) / step
        moved = tuner.mu * m + tuner.rate * g
        w = w - ((1 + tuner.mu) * moved - tuner.mu * m if nesterov else moved)
        m = moved
        tuner.see(g)
        state = run(
            "YellowFin",
            [*state, g, np.array([step])],
            8,
            {i: i for i in range(8)},
            beta=BETA,
            curv_win_width=WINDOW,
            epsilon=EPSILON,
            nesterov=nesterov,
        )
        for value, wanted in zip(state, [w, m, [tuner.rate], [tuner.mu]], strict=False):
            np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-5)
