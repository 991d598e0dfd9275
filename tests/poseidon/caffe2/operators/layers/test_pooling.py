"""Pooling against numpy, gradients by finite differences."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = np.random.RandomState(3).permutation(2 * 3 * 7 * 6).reshape(2, 3, 7, 6).astype("f4") / 100 + 0.1


def pool(
    x: Array, kind: str, kernel: int, stride: int, pads: tuple[int, ...], include: bool = False
) -> Array:
    top, left, bottom, right = pads
    height, width = x.shape[2:]
    rows, columns = (
        (height + top + bottom - kernel) // stride + 1,
        (width + left + right - kernel) // stride + 1,
    )
    y = np.zeros((*x.shape[:2], rows, columns), "float32")
    for row, column in product(range(rows), range(columns)):
        begin, start = row * stride - top, column * stride - left
        window = x[:, :, max(begin, 0) : begin + kernel, max(start, 0) : start + kernel]
        if kind == "MaxPool":
            y[:, :, row, column] = window.max((2, 3))
        elif kind == "LpPool":
            y[:, :, row, column] = (window**2).sum((2, 3)) ** 0.5
        else:
            count = kernel * kernel if include else window.shape[2] * window.shape[3]
            y[:, :, row, column] = window.sum((2, 3)) / count
    return y


CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"kernel": 2, "stride": 2}, (0, 0, 0, 0)),
    ({"kernel": 3, "stride": 2, "pad": 1}, (1, 1, 1, 1)),
    ({"kernel": 3, "stride": 2, "pads": [0, 1, 2, 1]}, (0, 1, 2, 1)),
    ({"kernel": 3, "stride": 2, "legacy_pad": 2}, (1, 0, 1, 1)),
    ({"kernel": 3, "stride": 2, "legacy_pad": 3}, (0, 0, 0, 1)),
    ({"kernel": 2, "stride": 1, "pad": 1}, (1, 1, 1, 1)),
]


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(("arguments", "pads"), CASES)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_pooling(kind: str, arguments: dict[str, Any], pads: tuple[int, ...], order: str) -> None:
    wanted = pool(X, kind, arguments["kernel"], arguments["stride"], pads)
    x = X if order == "NCHW" else X.transpose(0, 2, 3, 1).copy()
    (y,) = run(kind, [x], order=order, **arguments)
    np.testing.assert_allclose(y if order == "NCHW" else y.transpose(0, 3, 1, 2), wanted, rtol=1e-4)
    assert_gradients(kind, [x[:1, :5]], [0], order=order, **arguments)


def test_zeros_around_the_image_count() -> None:
    (y,) = run("AveragePool", [X], kernel=3, stride=2, pad=1, count_include_pad=1)
    np.testing.assert_allclose(y, pool(X, "AveragePool", 3, 2, (1, 1, 1, 1), True), rtol=1e-4)
    assert_gradients(
        "AveragePool", [X[:1, :1]], [0], kernel=3, stride=2, pad=1, count_include_pad=1
    )


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_global_pooling(kind: str, order: str) -> None:
    axes = (2, 3) if order == "NCHW" else (1, 2)
    (y,) = run(kind, [X], order=order, global_pooling=1)
    wanted = X.max(axes, keepdims=True) if kind == "MaxPool" else X.mean(axes, keepdims=True)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    assert_gradients(kind, [X[:1]], [0], order=order, global_pooling=1)


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
