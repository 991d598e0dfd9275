"""Gather, scatter, one-hot rows, unique values, sparse and dense forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(4, 5, 2)
INDICES = np.array([[3, 0], [1, 3]], dtype=np.int64)
STRINGS = np.array([b"a", b"b", b"c", b"d"], dtype=object)


def test_gather_of_strings_and_from_the_end() -> None:
    assert run("Gather", [STRINGS, INDICES])[0].tolist() == [[b"d", b"a"], [b"b", b"d"]]
    np.testing.assert_array_equal(run("Gather", [X, np.array([-1])], wrap_indices=1)[0], X[-1:])
    assert run("Gather", [INDICES[0], np.array(1)])[0] == INDICES[0, 1]
    with pytest.raises(RuntimeError):
        run("Gather", [X, np.array([7])])


def test_batch_gather_with_outer_dimensions_that_match() -> None:
    indices = np.array([[0, 4], [1, 1], [2, 0], [3, 3]])
    expected = np.stack([X[row, indices[row]] for row in range(4)])
    np.testing.assert_array_equal(run("BatchGather", [X, indices], match_outer=1)[0], expected)
    assert_gradients("BatchGather", [X, indices], [0], match_outer=1)
    assert_gradients("Gather", [X, indices], [0], axis=1, match_outer=1)


def test_shapes_of_gathered_ranges_are_inferred() -> None:
    net = core.Net("ranges")
    net.GatherRanges(["x", "ranges"], ["y", "lengths"])
    shapes, _ = workspace.InferShapesAndTypes([net], {"x": [64], "ranges": [3, 5, 2]})
    assert (shapes["y"], shapes["lengths"]) == ([64], [3])


V = np.arange(6, dtype="f4")


def ints(*values: Any) -> Array:
    return np.array(values, np.int32)


def floats(*values: Any) -> Array:
    return np.array(values, np.float32)


KEPT = np.array([True, False, True])
RANGES = ints([[0, 1], [2, 2]], [[4, 1], [5, 1]])
DENSE = ints([[2, 2], [0, 1]], [[0, 0], [4, 1]])
MASK = {"mask": [7, 2], "return_presence_mask": 1}
CODES: list[Array] = [ints(2, 1), np.array([0, 2, 1]), np.array([3])]
BUCKETS = [floats([0.5, 2], [3, 0]), ints(2, 1), floats(1, 2, 1)]
PARTS = [KEPT[:2], floats(1), ~KEPT[:2], floats(2)]
PLACES = [np.array([2, 7, 3]), floats(1, 2, 3), np.array(9, "f4"), ints(2, 1)]


@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "expected"),
    [
        ("GatherRanges", [V, RANGES], {}, [[0, 2, 3, 4, 5], [3, 2]]),
        ("LengthsGather", [V, ints(0, 2, 3, 1), ints(2, 0, 2)], {}, [[2, 3, 4, 2, 3, 4]]),
        ("GatherRangesToDense", [V, DENSE], {"lengths": [2, 1]}, [[[2, 3], [0, 0]], [[0], [4]]]),
        ("SegmentOneHot", CODES, {}, [[[1, 0, 1], [0, 1, 0]]]),
        ("BatchBucketOneHot", BUCKETS, {}, [[[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]]]),
        ("BatchBucketOneHot", [floats([0]), ints(4), floats(-1, 0, 0, 2)], {}, [[[0, 0, 1, 0, 0]]]),
        ("Find", [ints(10, 20, 10), ints(10, 5, 20)], {"missing_value": -7}, [[2, -7, 1]]),
        ("FindDuplicateElements", [np.array([b"a", b"b", b"a"], dtype=object)], {}, [[2]]),
        ("BooleanMask", [V[:3], KEPT], {}, [[0, 2], [0, 2]]),
        ("BooleanMaskLengths", [ints(2, 0, 2), np.append(KEPT, True)], {}, [[1, 0, 2]]),
        ("BooleanUnmask", PARTS, {}, [[1, 2]]),
        ("SparseToDenseMask", PLACES, MASK, [[[2, 1], [9, 9]], [[True, True], [False, False]]]),
    ],
)
def test_values(
    kind: str, inputs: list[Array], arguments: dict[str, Any], expected: list[Any]
) -> None:
    assert_run(kind, inputs, *expected, outputs=len(expected), **arguments)


def test_sparse_to_dense() -> None:
    indices, values = np.array([1, 3, 1], np.int32), numbers(3, 2)
    expected = np.zeros((5, 2), "f4")
    np.add.at(expected, indices, values)
    np.testing.assert_allclose(run("SparseToDense", [indices, values])[0], expected[:4])
    assert_run("SparseToDense", [indices, values, np.zeros((5, 1), "f4")], expected, rtol=1e-7)
    assert_gradients("SparseToDense", [indices, values], [1])


def test_gradients_of_masks() -> None:
    x = numbers(3, 2)
    assert_gradients("BooleanMask", [x, np.array([True, False, True])], [0], 2)
    inputs = [np.array([2, 7, 3]), x, np.zeros(2, "f4"), np.array([2, 1], np.int32)]
    assert_gradients("SparseToDenseMask", inputs, [1], mask=[7, 2])


@pytest.mark.parametrize("kind", ["Gather", "BatchGather"])
def test_an_empty_axis_gives_an_empty_result(kind: str) -> None:
    x = np.zeros((0, 2) if kind == "Gather" else (2, 0), "f4")
    assert run(kind, [x, np.array([0, 1], "i4")])[0].shape == x.shape


def test_no_gradient_goes_through_one_hot_rows() -> None:
    net = core.Net("rows")
    marks = net.OneHot(["indices", "size"], "marks")
    net.AddExternalInput("x")
    net.SumElements(net.Mul(["x", marks], "chosen"), "loss")
    assert set(map(str, net.AddGradientOperators(["loss"]))) >= {"x"}
    assert not [op for op in net.Proto().op if op.type == "OneHotGradient"]


def test_the_shape_of_one_hot_rows_of_intervals_is_inferred() -> None:
    net = core.Net("intervals")
    net.BatchBucketOneHot(["x", "lengths", "boundaries"], ["y"])
    shapes, types = workspace.InferShapesAndTypes(
        [net], {"x": [7, 2], "lengths": [2], "boundaries": [5]}
    )
    assert shapes["y"] == [7, 7]
    assert types["y"] == core.DataType.FLOAT
