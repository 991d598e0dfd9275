"""Lengths, ids, ranges, packing and parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

LENGTHS = np.array([2, 0, 3], np.int32)
IDS = np.array([0, 0, 2, 2, 2], np.int32)
X = numbers(5, 2)


@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "expected"),
    [
        ("LengthsToOffsets", [LENGTHS], {}, [0, 2, 2]),
        ("LengthsToOffsets", [LENGTHS], {"include_last_offset": 1}, [0, 2, 2, 5]),
        ("LengthsToWeights", [np.array([4, 1], np.int32)], {}, [0.5] * 4 + [1]),
        ("LengthsToWeights", [np.array([2, 1], np.int32)], {"power": 1.0}, [0.5, 0.5, 1]),
        ("SegmentIdsToLengths", [IDS, np.zeros(4, "f4")], {}, [2, 0, 3, 0]),
        ("SegmentIdsToRanges", [IDS], {}, [[0, 2], [2, 0], [2, 3]]),
        ("SegmentIdsToRanges", [IDS, np.zeros(4)], {}, [[0, 2], [2, 0], [2, 3], [0, 0]]),
    ],
)
def test_values(kind: str, inputs: list[Array], arguments: dict[str, Any], expected: Any) -> None:
    np.testing.assert_allclose(run(kind, inputs, **arguments)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("width", [2, 4])
def test_packing_to_a_length(width: int) -> None:
    (packed,) = run("PackSegments", [LENGTHS, X], max_length=width)
    assert packed.shape == (3, width, 2)
    (rows,) = run("UnpackSegments", [LENGTHS, packed], max_length=width)
    kept = [0, 1, 2, 3, 4] if width > 2 else [0, 1, 2, 3]
    np.testing.assert_array_equal(rows[kept], X[kept])


def test_packing_of_strings() -> None:
    strings = np.array([b"a", b"b", b"c"], dtype=object)
    (packed,) = run("PackSegments", [np.array([1, 2], np.int32), strings])
    assert packed.tolist() == [[b"a", b""], [b"b", b"c"]]


def test_segments_backwards() -> None:
    x, lengths = numbers(3, 2, 1), np.array([3, 2], np.int32)
    (y,) = run("ReversePackedSegs", [x, lengths])
    np.testing.assert_array_equal(y[:, 0], x[::-1, 0])
    np.testing.assert_array_equal(y[:2, 1], x[1::-1, 1])
    assert_gradients("ReversePackedSegs", [x, lengths], [0])


def test_parts_by_key() -> None:
    keys, values = np.array([0, 5, 2, 7]), np.array([10, 15, 12, 17], "f4")
    even, even_values, odd, odd_values = run("Partition", [keys, values], 4)
    assert (even.tolist(), odd.tolist()) == ([0, 2], [5, 7])
    assert (even_values.tolist(), odd_values.tolist()) == ([10, 12], [15, 17])
    assert run("Partition", [keys], 2, pack_first_input=1)[1].tolist() == [2, 3]
    np.testing.assert_array_equal(run("GatherByKey", [keys, even_values, odd_values])[0], values)
    assert_gradients("GatherByKey", [keys, even_values, odd_values], [1, 2])
    parts = run("LengthsPartition", [np.array([1, 3], np.int32), keys], 4)
    assert [part.tolist() for part in parts] == [[1, 1], [0, 2], [0, 2], [5, 7]]
