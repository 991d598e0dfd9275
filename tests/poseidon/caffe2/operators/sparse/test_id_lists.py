"""Lists of ids by example, against values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run

LENGTHS, INDICES = np.array([2, 0, 1], "i4"), np.array([3, 0, 1], "i8")
VALUES = numbers(3)
DENSE = np.array([[VALUES[1], 9, 9, VALUES[0]], [9] * 4, [9, VALUES[2], 9, 9]], "f4")


def test_dense_and_sparse_rows() -> None:
    inputs = [LENGTHS, INDICES, VALUES]
    (y,) = run("BatchSparseToDense", inputs, dense_last_dim=4, default_value=9.0)
    np.testing.assert_array_equal(y, DENSE)
    (like,) = run("BatchSparseToDense", [*inputs, numbers(3, 4)], default_value=9.0)
    np.testing.assert_array_equal(like, DENSE)
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
    np.testing.assert_array_equal(
        run("NGramFromCategorical", [x], **settings)[0], [0, 1 + 2 * 2, 2]
    )


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
