"""Pooling against numpy, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

X = np.random.RandomState(3).permutation(2 * 3 * 7 * 6).reshape(2, 3, 7, 6).astype("f4") / 100 + 0.1


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_other_dimensions(kind: str, dimensions: int) -> None:
    x = X.reshape(2, 3, *((42,) if dimensions == 1 else (7, 2, 3)))[:, :, :4]
    (y,) = run(f"{kind}{dimensions}D", [x], kernels=[2] * dimensions, strides=[1] * dimensions)
    window = x[0, 0][(slice(2),) * dimensions]
    np.testing.assert_allclose(
        y[0, 0].flat[0], window.max() if kind == "MaxPool" else window.mean(), rtol=1e-5
    )
    assert_gradients(kind, [x], [0], kernels=[2] * dimensions, strides=[1] * dimensions)


def test_all_equal_maxima_get_the_gradient() -> None:
    x = np.ones((1, 1, 2, 2), "float32")
    y = dy = np.ones((1, 1, 1, 1), "float32")
    assert_run("MaxPoolGradient", [x, y, dy], x, kernel=2)


def test_the_numbers_of_a_norm() -> None:
    assert_gradients("LpPool", [numbers(1, 1, 4, 4)], [0], kernel=2, p=3.0)


def test_a_norm_is_of_the_power_2_by_default() -> None:
    x = numbers(1, 1, 4, 4)
    (y,) = run("LpPool", [x], kernel=4)
    np.testing.assert_allclose(y.item(), np.sqrt((x * x).sum()), rtol=1e-5)


@pytest.mark.parametrize("kind", ["AveragePool", "LpPool"])
def test_means_and_norms_take_no_dilation(kind: str) -> None:
    with pytest.raises(
        (RuntimeError, ValueError), match=r"only MaxPool takes a dilation; it is \[2\]"
    ):
        run(kind, [X], kernel=2, dilation=2)
