"""`GatherRangesToDense`: matrices with rows of zeros, sorted by keys, and its checks of empty
and short ranges.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import run

V = np.arange(6, dtype="f4")
RANGES = np.array([[[2, 2], [0, 1]], [[0, 0], [4, 1]]], np.int32)


def test_rows_are_sorted_by_their_keys() -> None:
    keys = np.array([0, 1, 9, 3, 4, 5])
    wide, narrow = run("GatherRangesToDense", [V, RANGES, keys], 2, lengths=[2, 1])
    np.testing.assert_array_equal(wide, [[3, 2], [0, 0]])
    np.testing.assert_array_equal(narrow, [[0], [4]])


def test_an_empty_vector_gives_zeros() -> None:
    (y,) = run("GatherRangesToDense", [V[:0], np.zeros((1, 1, 2), np.int32)], 1, lengths=[3])
    np.testing.assert_array_equal(y, np.zeros((1, 3), "f4"))


def test_too_many_empty_ranges_are_refused() -> None:
    run(
        "GatherRangesToDense",
        [V, RANGES],
        2,
        lengths=[2, 1],
        min_observation=2,
        max_empty_ratio=0.5,
    )
    with pytest.raises(RuntimeError, match="1 of 2 ranges of the output 0 are empty"):
        run(
            "GatherRangesToDense",
            [V, RANGES],
            2,
            lengths=[2, 1],
            min_observation=2,
            max_empty_ratio=0.4,
        )


def test_too_many_ranges_of_another_length_are_refused() -> None:
    run("GatherRangesToDense", [V, RANGES], 2, lengths=[2, 5], max_mismatched_ratio=0.3)
    with pytest.raises(
        RuntimeError, match="2 of 2 ranges of the output 1 are of a different length"
    ):
        run(
            "GatherRangesToDense",
            [V, RANGES],
            2,
            lengths=[2, 5],
            min_observation=2,
            max_mismatched_ratio=0.3,
        )
