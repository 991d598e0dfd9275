"""Updates of whole parameters by their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe2.operators.training import optimizers
from tests.support.caffe2_operators import assert_run, numbers, run

W, G, M = numbers(3, 2), numbers(3, 2, seed=1), numbers(3, 2, seed=2)
H, D = np.abs(numbers(3, 2, seed=3)), np.abs(numbers(3, 2, seed=4))
LR = np.array([0.1], "float32")


def test_an_update_in_tiles_has_the_bits_of_one_in_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"momentum": 0.9, "nesterov": 1}
    values = [torch.from_numpy(x) for x in (G, M, LR, W)]
    monkeypatch.setattr(optimizers, "TILE", 4)
    found = run("MomentumSGDUpdate", [G, M, LR, W], 3, {0: 0, 1: 1, 2: 3}, **arguments)
    step, moved = optimizers.Momentum(0.9, nesterov=True).step(*values[:3])
    for value, wanted in zip(found, [step, moved, values[3] - step], strict=True):
        np.testing.assert_array_equal(value, wanted.numpy())


def test_weight_decay_in_mixed_precision() -> None:
    found = run("FP32MomentumSGDUpdate", [G, M, LR, W], 3, momentum=0.9, weight_decay=0.5)
    np.testing.assert_allclose(found[2], W - (0.9 * M + 0.1 * (G + 0.5 * W)), rtol=1e-4, atol=1e-6)
    half = [x.astype("float16") for x in (G, M, LR, W)]
    narrow = run("FP16MomentumSGDUpdate", half, 3, momentum=0.9, weight_decay=0.5)
    assert narrow[2].dtype == np.float16
    np.testing.assert_allclose(narrow[2], found[2], rtol=1e-2, atol=1e-2)


def test_adadelta_has_no_number_where_both_means_are_negative() -> None:
    low = np.full_like(W, -1)
    found = run("Adadelta", [W, low, low, np.zeros_like(W), LR], 3, decay=0.5, epsilon=0.1)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1], low / 2)


@pytest.mark.parametrize("fed", [False, True])
def test_ftrl_sets_small_parameters_to_zero(fed: bool) -> None:
    squares = H + G * G
    sums = M + G - (np.sqrt(squares) - np.sqrt(H)) / 0.1 * W
    solved = (0.5 * np.sign(sums) - sums) / ((1 + np.sqrt(squares)) / 0.1 + 0.2)
    wanted = np.where(np.abs(sums) > 0.5, solved, 0)
    inputs = [W, np.stack((H, M), -1), G, *([LR] if fed else [])]
    found = run("Ftrl", inputs, 2, alpha=9.0 if fed else 0.1, lambda1=0.5, lambda2=0.2)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], np.stack((squares, sums), -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("number", "factor"), [(4, 0.5), (3, 1), (9, 1), (14, 1)])
def test_weights_are_scaled_now_and_then(number: int, factor: float) -> None:
    settings = {"stepsize": 5, "upper_bound_iter": 10, "scale": 0.5}
    w = numbers(3)
    assert_run("WeightScale", [w, np.array([number])], factor * w, rtol=1e-7, **settings)
    assert_run("WeightScale", [w, np.array([14])], w * 0.5, stepsize=5, scale=0.5)
