"""Activations that no recorded case of Caffe2 has, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core
from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

X = numbers(3, 4)
Function = Callable[[Array], Array]


CASES: list[tuple[str, dict[str, Any], Function]] = [
    (
        "Gelu",
        {"fast_gelu": 1},
        lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    ),
    ("Mish", {}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    ("ReluN", {"n": 0.8}, lambda x: np.clip(x, 0, 0.8)),
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


def test_softsign_in_place_has_no_gradient() -> None:
    op = core.CreateOperator("Softsign", ["x"], ["x"])
    with pytest.raises(Exception, match="Softsign in place has no gradient"):
        core.GradientRegistry.GetBackwardPass([op], {"x": "x_grad"})


def test_the_last_dimension_is_halved_by_a_gate() -> None:
    x = numbers(2, 4)
    (y,) = run("Glu", [x])
    np.testing.assert_allclose(y, x[:, :2] / (1 + np.exp(-x[:, 2:])), rtol=1e-5)
