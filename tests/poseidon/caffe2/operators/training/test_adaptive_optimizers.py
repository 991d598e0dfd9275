"""Updates that follow the norms of the gradients, by their formulas."""

from __future__ import annotations

import numpy as np

from tests.support.caffe2_operators import numbers, run

W, G, M = numbers(3, 2), numbers(3, 2, seed=1), numbers(3, 2, seed=2)
H, LR = np.abs(numbers(3, 2, seed=3)), np.array([0.1], "float32")


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
