"""Padding of segments against loops over the segments, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, numbers, run

LENGTHS = np.array([2, 0, 3], np.int32)
ROWS, START, END = numbers(5, 2), numbers(2, seed=1), numbers(2, seed=2)


def padded(rows: Array, before: int, behind: int, start: Array, end: Array) -> Array:
    parts = np.split(rows, np.cumsum(LENGTHS)[:-1])
    return np.concatenate(
        [np.stack([start] * before + list(part) + [end] * behind) for part in parts]
    )


@pytest.mark.parametrize(("before", "behind"), [(1, 1), (2, 1), (1, 2)])
def test_padding_is_added_removed_and_summed(before: int, behind: int) -> None:
    widths = {"padding_width": before, "end_padding_width": behind}
    wanted = padded(ROWS, before, behind, START, END)
    y, lengths = run("AddPadding", [ROWS, LENGTHS, START, END], 2, **widths)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(lengths, LENGTHS + before + behind)
    x, old = run("RemovePadding", [y, lengths], 2, **widths)
    np.testing.assert_array_equal(x, ROWS)
    np.testing.assert_array_equal(old, LENGTHS)
    first, last = run("GatherPadding", [y, lengths], 2, **widths)
    np.testing.assert_allclose(first, START * before * 3, rtol=1e-5)
    np.testing.assert_allclose(last, END * behind * 3, rtol=1e-5)
    assert_gradients("AddPadding", [ROWS, LENGTHS, START, END], [0, 2, 3], 2, **widths)
    assert_gradients("AddPadding", [ROWS, LENGTHS, START], [0, 2], 2, **widths)
    assert_gradients("RemovePadding", [y, lengths], [0], 2, **widths)


def test_one_segment_and_zeros_are_the_defaults() -> None:
    y, lengths = run("AddPadding", [ROWS], 2, padding_width=2)
    np.testing.assert_array_equal(y, np.pad(ROWS, ((2, 2), (0, 0))))
    np.testing.assert_array_equal(lengths, [9])


def test_a_segment_shorter_than_its_padding_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="fewer rows than its padding"):
        run("RemovePadding", [ROWS, LENGTHS], 2)


def test_samples_without_rows_get_one() -> None:
    names = np.array([b"a", b"b", b"c", b"d", b"e"], dtype=object)
    lengths, rows, texts = run("PadEmptySamples", [LENGTHS, ROWS, names], 3)
    np.testing.assert_array_equal(lengths, [2, 1, 3])
    np.testing.assert_array_equal(rows, np.insert(ROWS, 2, 0, axis=0))
    assert texts.tolist() == [b"a", b"b", b"", b"c", b"d", b"e"]


def test_segments_of_one_length() -> None:
    (y,) = run("LengthsPad", [ROWS, LENGTHS], target_length=3, padding_value=-1.0)
    np.testing.assert_array_equal(y[[0, 1, 6, 7, 8]], ROWS)
    np.testing.assert_array_equal(y[2:6], np.full((4, 2), -1.0))
    with pytest.raises(RuntimeError, match="longer than 2"):
        run("LengthsPad", [ROWS, LENGTHS], target_length=2)


def test_lengths_in_parts() -> None:
    np.testing.assert_array_equal(
        run("LengthsSplit", [np.array([9, 4, 5, 1], "i4")], n_split=3)[0],
        [3, 3, 3, 2, 1, 1, 2, 2, 1, 1, 0, 0],
    )


def test_blocks_are_removed() -> None:
    (y,) = run("RemoveDataBlocks", [ROWS, np.array([3, 0, 3])])
    np.testing.assert_array_equal(y, ROWS[[1, 2, 4]])


def test_sequences_side_by_side() -> None:
    (y,) = run("PackRNNSequence", [ROWS, LENGTHS])
    np.testing.assert_array_equal(y[:, 2], ROWS[2:])
    np.testing.assert_array_equal(y[:, 0], np.append(ROWS[:2], [[0, 0]], 0))
    assert not y[:, 1].any()
    np.testing.assert_array_equal(run("UnpackRNNSequence", [y, LENGTHS])[0], ROWS)
    assert_gradients("PackRNNSequence", [ROWS, LENGTHS], [0])
    ones = np.ones((3, 3, 2), np.float32)
    (z,) = run("VariableLengthSequencePadding", [ones, LENGTHS], in_place={0: 0})
    np.testing.assert_array_equal(z[..., 0], [[1, 0, 1], [1, 0, 1], [0, 0, 1]])


@pytest.mark.parametrize("kind", ["AddPadding", "LengthsSum", "LengthsMean", "LengthsMax"])
def test_shapes_follow_from_the_number_of_lengths(kind: str) -> None:
    (y,) = run(kind, [ROWS, LENGTHS])
    net = core.Net("shapes")
    net.Proto().op.extend([core.CreateOperator(kind, ["x0", "x1"], ["y0"])])
    shapes, types = workspace.InferShapesAndTypes([net])
    assert shapes["y0"] == list(y.shape)
    assert types["y0"] == core.DataType.FLOAT
