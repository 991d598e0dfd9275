"""Padding of segments against loops over the segments, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

LENGTHS, INDICES = np.array([2, 0, 1], "i4"), np.array([3, 0, 1], "i8")
VALUES = numbers(3)
DENSE = np.array([[VALUES[1], 9, 9, VALUES[0]], [9] * 4, [9, VALUES[2], 9, 9]], "f4")


def test_dense_and_sparse_rows() -> None:
    inputs = [LENGTHS, INDICES, VALUES]
    (y,) = run("BatchSparseToDense", inputs, dense_last_dim=4, default_value=9.0)
    np.testing.assert_array_equal(y, DENSE)
    assert_run("BatchSparseToDense", [*inputs, numbers(3, 4)], DENSE, default_value=9.0)
    np.testing.assert_array_equal(run("BatchDenseToSparse", [LENGTHS, INDICES, y])[0], VALUES)
    assert_gradients("BatchSparseToDense", inputs, [2], dense_last_dim=4)
    assert_gradients("BatchDenseToSparse", [LENGTHS, INDICES, DENSE], [2])
    with pytest.raises(RuntimeError, match="needs dense_last_dim"):
        run("BatchSparseToDense", inputs)


def test_columns_of_values_that_are_not_zero() -> None:
    lengths, ids = run(
        "DenseVectorToIdList", [np.array([[0, 2, 3], [0, 0, 0], [1, 0, 0]], "f4")], 2
    )
    np.testing.assert_array_equal(lengths, [2, 0, 1])
    np.testing.assert_array_equal(ids, [1, 2, 0])


def test_merged_lists_have_each_id_once() -> None:
    first = [np.array([2, 1], "i4"), np.array([7, 3, 5], "i8")]
    second = [np.array([1, 2], "i4"), np.array([3, 5, 1], "i8")]
    lengths, values = run("MergeIdLists", [*first, *second], 2)
    np.testing.assert_array_equal(lengths, [2, 2])
    assert [set(part) for part in np.split(values, [2])] == [{3, 7}, {1, 5}]


def test_places_of_keys() -> None:
    found = run("KeySplit", [np.array([2, 0, 2, 1])], 4, categorical_limit=4)
    assert [places.tolist() for places in found] == [[1], [3], [0, 2], []]
    with pytest.raises(RuntimeError, match="from 0 to 1"):
        run("KeySplit", [np.array([2])], 2, categorical_limit=2)


@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_hashes_of_indices(dtype: str) -> None:
    indices = np.arange(-50, 50).astype(dtype)
    (found,) = run("IndexHash", [np.append(indices, indices)], seed=7, modulo=1000)
    assert found.dtype == dtype
    assert ((found >= 0) & (found < 1000)).all()
    np.testing.assert_array_equal(found[:100], found[100:])
    assert len(set(found.tolist())) > 80
    assert (run("IndexHash", [indices], seed=8, modulo=1000)[0] != found[:100]).any()


def test_one_number_for_several_categories() -> None:
    x = np.array([[4, 0, 10], [5, 0, 30], [4, 1, 20]], "f4")
    settings = {"col_ids": [0, 2], "categorical_limits": [2, 3], "vals": [4, 5, 10, 20, 30]}
    assert_run("NGramFromCategorical", [x], [0, 1 + 2 * 2, 2], **settings)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_lists_of_ids_are_replaced(ratio: float) -> None:
    ids, lengths = np.arange(5), np.array([2, 0, 3], "i4")
    found, made = run(
        "SparseDropoutWithReplacement", [ids, lengths], 2, ratio=ratio, replacement_value=-1
    )
    assert made.sum() == len(found)
    begin = 0
    for example, part in enumerate(np.split(ids, [2, 2])):
        values = found[begin : begin + made[example]].tolist()
        assert values in (
            [part.tolist(), [-1]] if 0 < ratio < 1 else [[-1] if ratio else part.tolist()]
        )
        begin += made[example]


@pytest.mark.parametrize(("dtype", "wanted"), [("i4", [998, 515, 120]), ("i8", [846, 831, 424])])
def test_hashes_are_those_of_caffe2(dtype: str, wanted: list[int]) -> None:
    (found,) = run("IndexHash", [np.array([5, -3, 100000], dtype)], seed=7, modulo=1000)
    assert found.tolist() == wanted
    assert found.dtype == dtype


def test_types_of_indices_are_those_of_caffe2() -> None:
    lengths, columns = run("DenseVectorToIdList", [np.array([[0, 2], [3, 4]], "f4")], 2)
    assert (lengths.dtype, columns.dtype, columns.tolist()) == ("i4", "i4", [1, 0, 1])
    settings = {"col_ids": [0], "categorical_limits": [2], "vals": [4, 5]}
    assert run("NGramFromCategorical", [np.array([[5]], "f4")], **settings)[0].dtype == "i8"


LENGTHS_OF_PADDING = np.array([2, 0, 3], np.int32)
ROWS, START, END = numbers(5, 2), numbers(2, seed=1), numbers(2, seed=2)


def padded(rows: Array, before: int, behind: int, start: Array, end: Array) -> Array:
    parts = np.split(rows, np.cumsum(LENGTHS_OF_PADDING)[:-1])
    return np.concatenate(
        [np.stack([start] * before + list(part) + [end] * behind) for part in parts]
    )


@pytest.mark.parametrize(("before", "behind"), [(1, 1), (2, 1), (1, 2)])
def test_padding_is_added_removed_and_summed(before: int, behind: int) -> None:
    widths = {"padding_width": before, "end_padding_width": behind}
    wanted = padded(ROWS, before, behind, START, END)
    y, lengths = run("AddPadding", [ROWS, LENGTHS_OF_PADDING, START, END], 2, **widths)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(lengths, LENGTHS_OF_PADDING + before + behind)
    x, old = run("RemovePadding", [y, lengths], 2, **widths)
    np.testing.assert_array_equal(x, ROWS)
    np.testing.assert_array_equal(old, LENGTHS_OF_PADDING)
    first, last = run("GatherPadding", [y, lengths], 2, **widths)
    np.testing.assert_allclose(first, START * before * 3, rtol=1e-5)
    np.testing.assert_allclose(last, END * behind * 3, rtol=1e-5)
    assert_gradients("AddPadding", [ROWS, LENGTHS_OF_PADDING, START, END], [0, 2, 3], 2, **widths)
    assert_gradients("AddPadding", [ROWS, LENGTHS_OF_PADDING, START], [0, 2], 2, **widths)
    assert_gradients("RemovePadding", [y, lengths], [0], 2, **widths)


def test_one_segment_and_zeros_are_the_defaults() -> None:
    y, lengths = run("AddPadding", [ROWS], 2, padding_width=2)
    np.testing.assert_array_equal(y, np.pad(ROWS, ((2, 2), (0, 0))))
    np.testing.assert_array_equal(lengths, [9])


def test_a_segment_shorter_than_its_padding_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="fewer rows than its padding"):
        run("RemovePadding", [ROWS, LENGTHS_OF_PADDING], 2)


def test_samples_without_rows_get_one() -> None:
    names = np.array([b"a", b"b", b"c", b"d", b"e"], dtype=object)
    lengths, rows, texts = run("PadEmptySamples", [LENGTHS_OF_PADDING, ROWS, names], 3)
    np.testing.assert_array_equal(lengths, [2, 1, 3])
    np.testing.assert_array_equal(rows, np.insert(ROWS, 2, 0, axis=0))
    assert texts.tolist() == [b"a", b"b", b"", b"c", b"d", b"e"]


def test_segments_of_one_length() -> None:
    (y,) = run("LengthsPad", [ROWS, LENGTHS_OF_PADDING], target_length=3, padding_value=-1.0)
    np.testing.assert_array_equal(y[[0, 1, 6, 7, 8]], ROWS)
    np.testing.assert_array_equal(y[2:6], np.full((4, 2), -1.0))
    with pytest.raises(RuntimeError, match="longer than 2"):
        run("LengthsPad", [ROWS, LENGTHS_OF_PADDING], target_length=2)


def test_lengths_in_parts() -> None:
    np.testing.assert_array_equal(
        run("LengthsSplit", [np.array([9, 4, 5, 1], "i4")], n_split=3)[0],
        [3, 3, 3, 2, 1, 1, 2, 2, 1, 1, 0, 0],
    )


def test_blocks_are_removed() -> None:
    assert_run("RemoveDataBlocks", [ROWS, np.array([3, 0, 3])], ROWS[[1, 2, 4]])


def test_sequences_side_by_side() -> None:
    (y,) = run("PackRNNSequence", [ROWS, LENGTHS_OF_PADDING])
    np.testing.assert_array_equal(y[:, 2], ROWS[2:])
    np.testing.assert_array_equal(y[:, 0], np.append(ROWS[:2], [[0, 0]], 0))
    assert not y[:, 1].any()
    np.testing.assert_array_equal(run("UnpackRNNSequence", [y, LENGTHS_OF_PADDING])[0], ROWS)
    assert_gradients("PackRNNSequence", [ROWS, LENGTHS_OF_PADDING], [0])
    ones = np.ones((3, 3, 2), np.float32)
    (z,) = run("VariableLengthSequencePadding", [ones, LENGTHS_OF_PADDING], in_place={0: 0})
    np.testing.assert_array_equal(z[..., 0], [[1, 0, 1], [1, 0, 1], [0, 0, 1]])


@pytest.mark.parametrize("kind", ["AddPadding", "LengthsSum", "LengthsMean", "LengthsMax"])
def test_shapes_follow_from_the_number_of_lengths(kind: str) -> None:
    (y,) = run(kind, [ROWS, LENGTHS_OF_PADDING])
    net = core.Net("shapes")
    net.Proto().op.extend([core.CreateOperator(kind, ["x0", "x1"], ["y0"])])
    shapes, types = workspace.InferShapesAndTypes([net])
    assert shapes["y0"] == list(y.shape)
    assert types["y0"] == core.DataType.FLOAT
