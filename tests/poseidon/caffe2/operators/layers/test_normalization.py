"""Batch normalization and LRN against numpy, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

SCALE, BIAS, MEAN, VARIANCE = (
    numbers(3),
    numbers(3, seed=1),
    numbers(3, seed=2),
    np.abs(numbers(3, seed=3)),
)


def ordered(x: Array, order: str) -> Array:
    return x if order == "NCHW" else np.moveaxis(x, 1, -1).copy()


def column(value: Array) -> Array:
    return value.reshape(1, -1, 1, 1)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_training_normalizes_by_the_batch_and_keeps_running_statistics(order: str) -> None:
    x = numbers(4, 3, 2, 3)
    inputs = [ordered(x, order), SCALE, BIAS, MEAN, VARIANCE]
    y, mean, variance, saved, inverse = run(
        "SpatialBN", inputs, 5, {1: 3, 2: 4}, is_test=0, order=order, epsilon=1e-3, momentum=0.8
    )
    batch, spread = x.mean((0, 2, 3)), x.var((0, 2, 3))
    wanted = column(SCALE) * (x - column(batch)) / np.sqrt(column(spread) + 1e-3) + column(BIAS)
    np.testing.assert_allclose(y, ordered(wanted, order), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(saved, batch, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(spread + 1e-3), rtol=1e-4)
    np.testing.assert_allclose(mean, 0.8 * MEAN + 0.2 * batch, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.8 * VARIANCE + 0.2 * spread * 24 / 23, rtol=1e-4)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_a_test_normalizes_by_the_running_statistics(order: str) -> None:
    x = numbers(2, 3, 2, 2)
    inputs = [ordered(x, order), SCALE, BIAS, MEAN, VARIANCE]
    (y,) = run("SpatialBN", inputs, is_test=1, order=order)
    wanted = column(SCALE) * (x - column(MEAN)) / np.sqrt(column(VARIANCE) + 1e-5) + column(BIAS)
    np.testing.assert_allclose(y, ordered(wanted, order), rtol=1e-4, atol=1e-5)
    assert_gradients("SpatialBN", inputs, [0, 1, 2], is_test=1, order=order)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_gradients_are_those_of_the_formula(order: str) -> None:
    x, dy = numbers(4, 3, 2, 3), numbers(4, 3, 2, 3, seed=5)
    mean, inverse = x.mean((0, 2, 3)), 1 / np.sqrt(x.var((0, 2, 3)) + 1e-5)
    normal = (x - column(mean)) * column(inverse)
    ds, db = (dy * normal).sum((0, 2, 3)), dy.sum((0, 2, 3))
    wanted = column(SCALE * inverse) * (dy - (column(db) + normal * column(ds)) / 24)
    found = run(
        "SpatialBNGradient",
        [ordered(x, order), SCALE, ordered(dy, order), mean, inverse],
        3,
        is_test=0,
        order=order,
    )
    for value, expected in zip(found, [ordered(wanted, order), ds, db], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)


def test_two_halves_with_their_sums_are_one_batch() -> None:
    x, dy = numbers(4, 3, 2, 3), numbers(4, 3, 2, 3, seed=5)
    whole = run("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], 5, {1: 3, 2: 4}, is_test=0)
    gradients = run("SpatialBNGradient", [x, SCALE, dy, *whole[3:]], 3, is_test=0)
    sums = [
        sum(values)
        for values in zip(*(run("ChannelStats", [part], 2) for part in (x[:2], x[2:])), strict=True)
    ]
    found = run(
        "SpatialBN",
        [x[:2], SCALE, BIAS, MEAN, VARIANCE, *sums],
        5,
        {1: 3, 2: 4},
        is_test=0,
        num_batches=2,
    )
    for value, expected in zip(found, [whole[0][:2], *whole[1:]], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)
    halves = [
        run("ChannelBackpropStats", [x[part], *whole[3:], dy[part]], 2)
        for part in (slice(2), slice(2, 4))
    ]
    totals = [sum(values) for values in zip(*halves, strict=True)]
    dx, ds, _ = run(
        "SpatialBNGradient",
        [x[:2], SCALE, dy[:2], *whole[3:], *totals],
        3,
        is_test=0,
        num_batches=2,
    )
    np.testing.assert_allclose(dx, gradients[0][:2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(ds, gradients[1] / 2, rtol=1e-3, atol=1e-4)


def test_whether_it_is_a_test_must_be_given() -> None:
    with pytest.raises(RuntimeError, match="SpatialBN: the argument is_test is required"):
        run("SpatialBN", [numbers(2, 3, 2, 2), SCALE, BIAS, MEAN, VARIANCE])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_response_normalization(order: str, outputs: int) -> None:
    x = numbers(2, 5, 2, 2)
    arguments = {"size": 3, "alpha": 0.3, "beta": 0.75, "bias": 2.0, "order": order}
    padded = np.pad(x * x, ((0, 0), (1, 1), (0, 0), (0, 0)))
    scale = 2 + 0.1 * (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:])
    found = run("LRN", [ordered(x, order)], outputs, **arguments)
    for value, expected in zip(found, [x * scale**-0.75, scale], strict=False):
        np.testing.assert_allclose(value, ordered(expected, order), rtol=1e-4)
    assert_gradients("LRN", [ordered(x, order)], [0], **arguments)


def test_an_empty_batch_keeps_the_running_statistics() -> None:
    x = np.zeros((0, 3, 2, 2), "float32")
    found = run("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], 5, {1: 3, 2: 4}, is_test=0)
    for value, wanted in zip(found, [x, MEAN, VARIANCE, 0 * MEAN, 0 * MEAN], strict=True):
        np.testing.assert_array_equal(value, wanted)
    for sums in ([], [MEAN, MEAN]):
        found = run("SpatialBNGradient", [x, SCALE, x, MEAN, VARIANCE, *sums], 3)
        for value, wanted in zip(found, [x, 0 * MEAN, 0 * MEAN], strict=True):
            np.testing.assert_array_equal(value, wanted)
