"""Updates that follow the norms of the gradients, by their formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, numbers, run

W, G, M = numbers(3, 2), numbers(3, 2, seed=1), numbers(3, 2, seed=2)
H, LR = np.abs(numbers(3, 2, seed=3)), np.array([0.1], "float32")


def test_storm() -> None:
    total = 2 + (G * G).sum()
    rate = 0.1 / (0.5 + total) ** (1 / 3)
    moved = G + (1 - 3 * rate**2) * (M - G)
    found = run("Storm", [W, M, np.array([2], "float32"), G, LR], 3, momentum=3.0, beta=0.5)
    for value, wanted in zip(found, [W + rate * moved, moved, [total]], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_wngrad() -> None:
    found = run("Wngrad", [W, np.array([2], "float32"), G, LR], 4)
    for value, wanted in zip(
        found, [W + 0.05 * G, [2 + (G * G).sum() / 2], [0.05], 0.05 * G], strict=True
    ):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_decay_adagrad() -> None:
    first, squares = 0.5 * M + 0.5 * G, H + G * G
    step = 0.1 / (1 - 0.5**4) * first / (np.sqrt(squares) + 0.1)
    found = run("DecayAdagrad", [W, M, H, G, LR, np.array([3])], 3, beta1=0.5, epsilon=0.1)
    for value, wanted in zip(found, [W + step, first, squares], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_decay_adagrad_adds_the_decayed_parameter_to_the_step() -> None:
    zero = np.zeros_like(W)
    found = run("DecayAdagrad", [W, zero, H, zero, LR, np.array([3])], 3, weight_decay=0.5)[0]
    np.testing.assert_allclose(found, W + 0.1 * 0.5 * W, rtol=1e-4, atol=1e-6)


def test_gftrl_drops_columns_of_small_norm() -> None:
    n, z = H, numbers(3, 2, seed=4)
    squares = n + G * G
    adjusted = z + G - (np.sqrt(squares) - np.sqrt(n)) / 0.5 * W
    norms = np.linalg.norm(adjusted, axis=0)
    lambda1 = norms.mean() / np.sqrt(3)
    kept = adjusted * (norms.mean() / norms - 1) / ((1 + np.sqrt(squares)) / 0.5 + 0.1)
    kept[:, norms < norms.mean()] = 0
    assert (kept == 0).any() and (kept != 0).any()
    settings = {"alpha": 0.5, "beta": 1.0, "lambda1": float(lambda1), "lambda2": 0.1}
    found = run("GFtrl", [W, np.stack([n, z], -1), G], 2, **settings)
    for value, wanted in zip(found, [kept, np.stack([squares, adjusted], -1)], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5)


def test_the_momentum_of_storm_has_no_limit() -> None:
    total = (G * G).sum()
    rate = 1 / total ** (1 / 3)
    found = run(
        "Storm", [W, M, np.zeros(1, "f4"), G, np.ones(1, "f4")], 3, momentum=100.0, beta=0.0
    )
    np.testing.assert_allclose(found[1], G + (1 - 100 * rate**2) * (M - G), rtol=1e-3, atol=1e-3)


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
    zeros = (np.zeros(size, "float32") for size in (1, WINDOW, 4, 4, 5))
    state = [w, m, np.ones(1, "float32"), *zeros]
    for step in range(1, 5):
        g = numbers(4, seed=step) / step
        moved = tuner.mu * m + tuner.rate * g
        w = w - ((1 + tuner.mu) * moved - tuner.mu * m if nesterov else moved)
        m = moved
        tuner.see(g)
        settings = {"beta": BETA, "curv_win_width": WINDOW, "epsilon": EPSILON}
        inputs, shared = [*state, g, np.array([step])], {i: i for i in range(8)}
        state = run("YellowFin", inputs, 8, shared, nesterov=nesterov, **settings)
        for value, wanted in zip(state, [w, m, [tuner.rate], [tuner.mu]], strict=False):
            np.testing.assert_allclose(value, wanted, rtol=2e-3, atol=1e-5)
