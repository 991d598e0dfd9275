"""Updates that follow the norms of the gradients, by their formulas."""

from __future__ import annotations

import numpy as np

from tests.support.caffe2_operators import numbers, run

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
    w, b = run("Wngrad", [W, np.array([2], "float32"), G, LR], 2)
    np.testing.assert_allclose(w, W + 0.05 * G, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(b, [2 + (G * G).sum() / 2], rtol=1e-4)


def test_decay_adagrad() -> None:
    first, squares = 0.5 * M + 0.5 * G, H + G * G
    step = 0.1 / (1 - 0.5**4) * first / (np.sqrt(squares) + 0.1)
    found = run("DecayAdagrad", [W, M, H, G, LR, np.array([3])], 3, beta1=0.5, epsilon=0.1)
    for value, wanted in zip(found, [W + step, first, squares], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)
