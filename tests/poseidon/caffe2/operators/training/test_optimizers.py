"""Updates of whole parameters by their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe2.operators.training import optimizers
from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

W, G, M = numbers(3, 2), numbers(3, 2, seed=1), numbers(3, 2, seed=2)
H, D = np.abs(numbers(3, 2, seed=3)), np.abs(numbers(3, 2, seed=4))
LR = np.array([0.1], "float32")


@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("shared", [{}, {0: 0, 1: 1, 2: 3}])
def test_momentum(nesterov: int, shared: dict[int, int]) -> None:
    moved = 0.9 * M + 0.1 * G
    step = 1.9 * moved - 0.9 * M if nesterov else moved
    arguments = {"momentum": 0.9, "nesterov": nesterov}
    found = run("MomentumSGDUpdate", [G, M, LR, W], 3, shared, **arguments)
    for value, wanted in zip(found, [step, moved, W - step], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
    assert_run("MomentumSGD", [G, M, LR], step, moved, rtol=1e-5, atol=1e-6, **arguments)


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


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_adagrad(decay: float) -> None:
    history = decay * H + G * G
    update = 0.1 * G / (np.sqrt(history) + 1e-3)
    found = run("Adagrad", [W, H, G, LR], 4, epsilon=1e-3, decay=decay)
    for value, wanted in zip(found, [W + update, history, update / G, update], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_adam_corrects_its_moments_with_the_next_iteration() -> None:
    first, second = 0.9 * M + 0.1 * G, 0.99 * H + 0.01 * G * G
    step = np.sqrt(1 - 0.99**4) / (1 - 0.9**4) * first / (np.sqrt(second) + 1e-3)
    found = run("Adam", [W, M, H, G, LR, np.array([3])], 4, beta1=0.9, beta2=0.99, epsilon=1e-3)
    for value, wanted in zip(found, [W + 0.1 * step, first, second, step], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_rms_prop() -> None:
    mean = 0.8 * H + 0.2 * G * G
    moved = 0.7 * M + 0.1 * G / np.sqrt(mean + 1e-3)
    found = run("RmsProp", [G, H, M, LR], 3, decay=0.8, momentum=0.7, epsilon=1e-3)
    for value, wanted in zip(found, [moved, mean, moved], strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_adadelta() -> None:
    history = 0.9 * H + 0.1 * G * G
    update = np.sqrt((D + 1e-3) / (history + 1e-3)) * G
    found = run("Adadelta", [W, H, D, G, LR], 3, decay=0.9, epsilon=1e-3)
    for value, wanted in zip(
        found, [W + 0.1 * update, history, 0.9 * D + 0.1 * update**2], strict=True
    ):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize(("most", "wanted"), [(9.0, None), (0.3, 0.3)])
def test_lars(most: float, wanted: float | None) -> None:
    def one(value: float) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([value], "float32")

    factor = 0.8 / (np.linalg.norm(G) / np.linalg.norm(W) + 0.1 + 0.5)
    assert_run("Lars", [W, G, one(0.1), one(0.8), one(most)], [wanted or factor], rtol=1e-5)
    np.testing.assert_allclose(run("Lars", [0 * W, G, one(0.1), one(0.8), one(9)])[0], [1.0])


def test_weighted_sums() -> None:
    weights = [np.array([0.5], "float32"), np.array([-2], "float32")]
    inputs = [W, weights[0], G, weights[1]]
    np.testing.assert_allclose(run("WeightedSum", inputs)[0], 0.5 * W - 2 * G, rtol=1e-5, atol=1e-6)
    assert_gradients("WeightedSum", inputs, [0, 2])
    assert_gradients("WeightedSum", inputs, [0, 1, 2, 3], grad_on_w=1)


@pytest.mark.parametrize(("number", "factor"), [(4, 0.5), (3, 1), (9, 1), (14, 1)])
def test_weights_are_scaled_now_and_then(number: int, factor: float) -> None:
    settings = {"stepsize": 5, "upper_bound_iter": 10, "scale": 0.5}
    w = numbers(3)
    assert_run("WeightScale", [w, np.array([number])], factor * w, rtol=1e-7, **settings)
