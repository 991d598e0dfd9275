"""Activations against numpy, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(3, 4)
Function = Callable[[Array], Array]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


CASES: list[tuple[str, dict[str, Any], Function]] = [
    ("Elu", {"alpha": 0.7}, lambda x: np.where(x > 0, x, 0.7 * (np.exp(x) - 1))),
    ("Selu", {}, lambda x: 1.0507 * np.where(x > 0, x, 1.67326 * (np.exp(x) - 1))),
    ("Selu", {"alpha": 1.1, "scale": 2.0}, lambda x: 2 * np.where(x > 0, x, 1.1 * (np.exp(x) - 1))),
    ("Gelu", {}, lambda x: x * (1 + np.vectorize(erf)(x / 2**0.5)) / 2),
    (
        "Gelu",
        {"fast_gelu": 1},
        lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    ),
    ("Swish", {}, lambda x: x * sigmoid(x)),
    ("Mish", {}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ("HardSigmoid", {}, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    ("HardSigmoid", {"alpha": 0.9, "beta": 0.1}, lambda x: np.clip(0.9 * x + 0.1, 0, 1)),
    ("ThresholdedRelu", {"alpha": 0.05}, lambda x: np.where(x > 0.05, x, 0)),
    ("ReluN", {"n": 0.8}, lambda x: np.clip(x, 0, 0.8)),
    ("Softplus", {}, lambda x: np.log(1 + np.exp(x))),
    ("Softsign", {}, lambda x: x / (1 + np.abs(x))),
]


@pytest.mark.parametrize(("kind", "arguments", "function"), CASES)
def test_activation(kind: str, arguments: dict[str, Any], function: Function) -> None:
    np.testing.assert_allclose(run(kind, [X], **arguments)[0], function(X), rtol=1e-4, atol=1e-5)
    assert_gradients(kind, [X], [0], **arguments)


@pytest.mark.parametrize("kind", ["Softplus", "Mish"])
def test_a_large_input_stays_finite(kind: str) -> None:
    np.testing.assert_allclose(run(kind, [np.array([-200, 200], "float32")])[0], [0, 200])


def test_mish_of_nothing() -> None:
    assert run("Mish", [X[:0]])[0].shape == (0, 4)


def test_half_of_glu_is_a_gate() -> None:
    np.testing.assert_allclose(run("Glu", [X], dim=1)[0], X[:, :2] * sigmoid(X[:, 2:]), rtol=1e-5)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("shared", [False, True])
def test_prelu(order: str, shared: bool) -> None:
    x = numbers(2, 3, 2, 2) if order == "NCHW" else numbers(2, 2, 2, 3)
    slope = numbers(1 if shared else 3)
    slopes = slope.reshape(-1, 1, 1) if order == "NCHW" else slope
    assert_run("PRelu", [x, slope], np.where(x > 0, x, slopes * x), rtol=1e-5, order=order)
    assert_gradients("PRelu", [x, slope], [0, 1], order=order)


def test_softsign_in_place_has_no_gradient() -> None:
    op = core.CreateOperator("Softsign", ["x"], ["x"])
    with pytest.raises(Exception, match="Softsign in place has no gradient"):
        core.GradientRegistry.GetBackwardPass([op], {"x": "x_grad"})
