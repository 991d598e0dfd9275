"""Batch normalization and LRN against numpy, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run

SCALE, BIAS, MEAN = (numbers(3, seed=seed) for seed in (0, 1, 2))
VARIANCE = np.abs(numbers(3, seed=3))


def test_two_halves_with_their_sums_are_one_batch() -> None:
    x, dy = numbers(4, 3, 2, 3), numbers(4, 3, 2, 3, seed=5)
    whole = run("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], 5, {1: 3, 2: 4}, is_test=0)
    gradients = run("SpatialBNGradient", [x, SCALE, dy, *whole[3:]], 3, is_test=0)
    sums = [
        sum(values)
        for values in zip(*(run("ChannelStats", [part], 2) for part in (x[:2], x[2:])), strict=True)
    ]
    half: dict[str, int] = {"is_test": 0, "num_batches": 2}
    found = run("SpatialBN", [x[:2], SCALE, BIAS, MEAN, VARIANCE, *sums], 5, {1: 3, 2: 4}, **half)
    for value, expected in zip(found, [whole[0][:2], *whole[1:]], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4)
    halves = [
        run("ChannelBackpropStats", [x[part], *whole[3:], dy[part]], 2)
        for part in (slice(2), slice(2, 4))
    ]
    totals = [sum(values) for values in zip(*halves, strict=True)]
    dx, ds, _ = run("SpatialBNGradient", [x[:2], SCALE, dy[:2], *whole[3:], *totals], 3, **half)
    np.testing.assert_allclose(dx, gradients[0][:2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(ds, gradients[1] / 2, rtol=1e-3, atol=1e-4)


def test_whether_it_is_a_test_must_be_given() -> None:
    with pytest.raises(RuntimeError, match="SpatialBN: the argument is_test is required"):
        run("SpatialBN", [numbers(2, 3, 2, 2), SCALE, BIAS, MEAN, VARIANCE])


def test_an_empty_batch_keeps_the_running_statistics() -> None:
    x = np.zeros((0, 3, 2, 2), "float32")
    found = run("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], 5, {1: 3, 2: 4}, is_test=0)
    for value, wanted in zip(found, [x, MEAN, VARIANCE, 0 * MEAN, 0 * MEAN], strict=True):
        np.testing.assert_array_equal(value, wanted)
    for sums in ([], [MEAN, MEAN]):
        found = run("SpatialBNGradient", [x, SCALE, x, MEAN, VARIANCE, *sums], 3)
        for value, wanted in zip(found, [x, 0 * MEAN, 0 * MEAN], strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_the_recorded_cases_give_epsilon_and_its_default_is_small() -> None:
    x = 0.01 * numbers(4, 3, 2, 3)
    y = run("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], 5, {1: 3, 2: 4}, is_test=0)[0]
    mean, variance = (of((0, 2, 3), keepdims=True) for of in (x.mean, x.var))
    wanted = (x - mean) / np.sqrt(variance + 1e-5) * SCALE[:, None, None] + BIAS[:, None, None]
    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-4)
    assert_gradients("SpatialBN", [x, SCALE, BIAS, MEAN, VARIANCE], [0, 1, 2], is_test=1)
