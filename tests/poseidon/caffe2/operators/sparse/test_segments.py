"""Segments: values by loops over the segments, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(7, 3)
ROWS = numbers(6, 3)
WEIGHTS = numbers(6, seed=3)
INDICES = np.array([6, 0, 3, 3, 1, 2])
IDS = np.array([0, 0, 1, 1, 1, 2], np.int32)
LENGTHS = np.array([2, 0, 3, 1], np.int32)
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Sum": np.sum,
    "Mean": np.mean,
    "Max": np.max,
    "LogSumExp": lambda x, axis: np.log(np.exp(x).sum(axis)),
    "LogMeanExp": lambda x, axis: np.log(np.exp(x).mean(axis)),
}


def by_lengths(kind: str, rows: Array, lengths: Array = LENGTHS) -> Array:
    parts = np.split(rows, np.cumsum(lengths)[:-1])
    return np.stack(
        [
            REDUCTIONS[kind](part, axis=0) if len(part) else np.zeros(rows.shape[1:])
            for part in parts
        ]
    )


def by_ids(kind: str, rows: Array, ids: Array = IDS) -> Array:
    return np.stack([REDUCTIONS[kind](rows[ids == n], axis=0) for n in range(ids.max() + 1)])


@pytest.mark.parametrize("kind", ["Sum", "Mean"])
@pytest.mark.parametrize("family", ["Sorted", "Unsorted"])
def test_segments_by_ids(kind: str, family: str) -> None:
    ids = IDS if family == "Sorted" else IDS[[3, 0, 5, 1, 2, 4]]
    name = f"{family}Segment{kind}"
    np.testing.assert_allclose(run(name, [ROWS, ids])[0], by_ids(kind, ROWS, ids), rtol=1e-5)
    assert_gradients(name, [ROWS, ids], [0])
    assert_run(f"Sparse{name}", [X, INDICES, ids], by_ids(kind, X[INDICES], ids), rtol=1e-5)
    assert_gradients(f"Sparse{name}", [X, INDICES, ids], [0])


def test_more_segments_than_ids() -> None:
    (y,) = run("UnsortedSegmentSum", [ROWS, IDS], num_segments=5)
    np.testing.assert_allclose(y[:3], by_ids("Sum", ROWS), rtol=1e-5)
    assert not y[3:].any()


@pytest.mark.parametrize("kind", list(REDUCTIONS))
def test_ranges_of_sorted_ids(kind: str) -> None:
    name = f"SortedSegmentRange{kind}"
    np.testing.assert_allclose(run(name, [ROWS, IDS])[0], by_ids(kind, ROWS), rtol=1e-5, atol=1e-6)
    assert_gradients(name, [ROWS, IDS], [0])


@pytest.mark.parametrize("on_weights", [0, 1])
@pytest.mark.parametrize("family", ["Lengths", "SortedSegment", "UnsortedSegment"])
def test_weighted_sums(family: str, on_weights: int) -> None:
    segments = LENGTHS if family == "Lengths" else IDS
    reduce = by_lengths if family == "Lengths" else by_ids
    wanted = [0, 1] if on_weights else [0]
    name = f"{family}WeightedSum"
    expected = reduce("Sum", ROWS * WEIGHTS[:, None])
    assert_run(name, [ROWS, WEIGHTS, segments], expected, rtol=1e-4, atol=1e-6)
    assert_gradients(name, [ROWS, WEIGHTS, segments], wanted, grad_on_weights=on_weights)
    expected = reduce("Sum", X[INDICES] * WEIGHTS[:, None])
    assert_run(f"Sparse{name}", [X, WEIGHTS, INDICES, segments], expected, rtol=1e-4, atol=1e-6)
    if family == "Lengths" or not on_weights:
        assert_gradients(
            f"Sparse{name}", [X, WEIGHTS, INDICES, segments], wanted, grad_on_weights=on_weights
        )


def test_weights_by_position() -> None:
    weights = np.array([1, 10, 100], "f4")
    (y,) = run("SparseLengthsPositionalWeightedSum", [X, weights, INDICES, LENGTHS])
    expected = by_lengths("Sum", X[INDICES] * weights[[0, 1, 0, 1, 2, 0], None])
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_halves_are_added_up_in_32_bits() -> None:
    table = np.array([[2048], [1]], "f2")  # their sum is no half
    for kind, total in (("Sum", 2049), ("Mean", 1024.5)):
        inputs = [table, np.array([0, 1]), np.array([2], np.int32)]
        assert run(f"SparseLengths{kind}", inputs)[0].astype("f8") == total


def test_no_rows_at_all() -> None:
    empty, none = np.zeros((0, 3), "f4"), np.zeros(0, np.int32)
    assert run("LengthsSum", [empty, none])[0].shape == (0, 3)
    assert run("SortedSegmentSum", [empty, none])[0].shape == (0, 3)


@pytest.mark.parametrize("prefix", ["", "Sparse"])
def test_gradients_of_older_releases(prefix: str) -> None:
    dy = numbers(4, 3)
    assert_run(f"{prefix}LengthsSumGradient", [dy, LENGTHS], np.repeat(dy, LENGTHS, axis=0))
