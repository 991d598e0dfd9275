"""Reductions: values by numpy, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

X = numbers(3, 4, 2)
LENGTHS = np.array([1, 3, 2], dtype=np.int32)
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Sum": np.sum,
    "Mean": np.mean,
    "Max": np.max,
    "Min": np.min,
    "L1": lambda x, axis, keepdims: np.abs(x).sum(axis, keepdims=keepdims),
    "L2": lambda x, axis, keepdims: np.sqrt((x * x).sum(axis, keepdims=keepdims)),
}


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("side", ["Front", "Back"])
def test_a_reduction_of_outer_dimensions(kind: str, count: int, side: str) -> None:
    axes = tuple(range(count)) if side == "Front" else tuple(range(3 - count, 3))
    (y,) = run(f"Reduce{side}{kind}", [X], num_reduce_dim=count)
    np.testing.assert_allclose(y, REDUCTIONS[kind](X, axis=axes, keepdims=False), rtol=1e-5)
    assert_gradients(f"Reduce{side}{kind}", [X], [0], num_reduce_dim=count)


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
@pytest.mark.parametrize("side", ["Front", "Back"])
def test_a_reduction_with_lengths(kind: str, side: str) -> None:
    x = numbers(4, 3) if side == "Front" else numbers(3, 4)
    columns = x.T if side == "Front" else x
    expected = [
        REDUCTIONS[kind](column[:length], axis=0, keepdims=False)
        for column, length in zip(columns, LENGTHS, strict=True)
    ]
    np.testing.assert_allclose(run(f"Reduce{side}{kind}", [x, LENGTHS])[0], expected, rtol=1e-5)
    assert_gradients(f"Reduce{side}{kind}", [x, LENGTHS], [0])


def test_the_sum_of_integers_and_of_nothing() -> None:
    assert run("ReduceMean", [np.zeros((0, 2), "f4")], axes=[0], keepdims=0)[0].tolist() == [0, 0]
    assert run("SumElementsInt", [np.array([1, 2], dtype=np.int32)])[0] == 3
    assert run("SumElements", [np.zeros((0, 2), "f4")])[0] == 0


@pytest.mark.parametrize("side", ["Front", "Back"])
@pytest.mark.parametrize("kind", ["Sum", "Mean"])
def test_a_gradient_needs_the_shape_of_the_input_only(side: str, kind: str) -> None:
    x = numbers(2, 3, 4)
    dy = numbers(4) if side == "Front" else numbers(2)
    name = f"Reduce{side}{kind}Gradient"
    (wanted,) = run(name, [dy, x], num_reduce_dim=2)
    assert_run(name, [dy, np.array(x.shape)], wanted, num_reduce_dim=2)


@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_the_norm_of_a_single_number_is_not_negative(kind: str) -> None:
    assert_run(f"Reduce{kind}", [np.array(-1.5, "f4")], np.array(1.5, "f4"))
