"""Concat and Split."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

X = numbers(2, 6, 4, 3)


def test_equal_parts() -> None:
    assert_run("Split", [X], *np.split(X, 3, 1), outputs=3)
    with pytest.raises(RuntimeError, match="6 values cannot be split into 4 equal parts"):
        run("Split", [X], 4)


def test_strings_are_joined() -> None:
    a = np.array([b"a", b"b"], dtype=object)
    assert run("Concat", [a, a[:1]], 2, axis=0)[0].tolist() == [b"a", b"b", b"a"]


@pytest.mark.parametrize(("scaled", "rows"), [(0, 6), (1, 12)])
def test_parts_by_lengths(scaled: int, rows: int) -> None:
    x, lengths = numbers(rows, 2), np.array([1, 2, 0, 3], "i4")
    first, second = run("SplitByLengths", [x, lengths], 2, axis=0, use_scaling_lengths=scaled)
    np.testing.assert_array_equal(np.concatenate([first, second]), x)
    assert len(first) == rows // 2
    assert_gradients(
        "SplitByLengths", [x, lengths], [0], 2, [0, 1], axis=0, use_scaling_lengths=scaled
    )


def test_lengths_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="add up to 3"):
        run("SplitByLengths", [numbers(4, 2), np.array([1, 2], "i4")], 2, axis=0)
    with pytest.raises(RuntimeError, match="cannot be dealt to 2"):
        run("SplitByLengths", [numbers(4, 2), np.array([1, 2, 1], "i4")], 2, axis=0)


def test_coalesced_blobs_share_a_buffer() -> None:
    x, y = numbers(2, 3), numbers(4, seed=1)
    found = run("UnsafeCoalesce", [x, y], 3, {0: 0, 1: 1})
    np.testing.assert_array_equal(found[2], np.concatenate([x.reshape(-1), y]))
    workspace.FeedBlob("y2", np.full(10, 3, "f4"))
    assert (workspace.FetchBlob("x0") == 3).all()
    assert (workspace.FetchBlob("x1") == 3).all()


def test_shapes_of_parts_do_not_follow_from_a_tensor_of_sizes() -> None:
    workspace.FeedBlob("x", numbers(4, 2))
    workspace.FeedBlob("sizes", np.array([1, 3], "i4"))
    net = core.Net("parts")
    net.Split(["x", "sizes"], ["a", "b"], axis=0)
    net.Split(["x"], ["c", "d"], axis=0)
    shapes, _ = workspace.InferShapesAndTypes([net])
    assert not {"a", "b"} & set(shapes)
    assert shapes["c"] == shapes["d"] == [2, 2]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_number_of_different_values_follows_for_one_at_most(count: int) -> None:
    workspace.FeedBlob("x", np.zeros(count, "i8"))
    net = core.Net("values")
    net.Unique(["x"], ["u", "places"])
    shapes, types = workspace.InferShapesAndTypes([net])
    if count > 1:
        assert "u" not in shapes
    else:
        assert shapes["u"] == shapes["places"] == [count]
        assert types["places"] == core.DataType.INT32


def test_the_shapes_of_the_gradients_of_parts_follow_from_their_names() -> None:
    workspace.FeedBlob("a", numbers(1, 2))
    workspace.FeedBlob("b", numbers(3, 2))
    net = core.Net("whole")
    net.Concat(["a", "b"], ["c", "sizes"], axis=0)
    net.SumElements("c", "loss")
    net.AddGradientOperators(["loss"])
    shapes, _ = workspace.InferShapesAndTypes([net])
    assert (shapes["a_grad"], shapes["b_grad"]) == ([1, 2], [3, 2])


X_OF_MASKS = numbers(3, 4)
LENGTHS = np.array([2, 0, 4], "i4")
SIDES: dict[str, Callable[[int, int], Any]] = {
    "upper": operator.gt,
    "lower": operator.lt,
    "upperdiag": operator.ge,
    "lowerdiag": operator.le,
}


@pytest.mark.parametrize("mode", [*SIDES, "sequence", "window"])
def test_masked_places(mode: str) -> None:
    wanted = X_OF_MASKS.copy()
    for i, j in np.ndindex(3, 4):
        if mode == "sequence":
            masked = j >= LENGTHS[i]
        elif mode == "window":
            masked = abs(j - LENGTHS[i]) > 1
        else:
            masked = SIDES[mode](j, i)
        if masked:
            wanted[i, j] = -7
    inputs = [X_OF_MASKS, LENGTHS] if mode in ("sequence", "window") else [X_OF_MASKS]
    arguments = {"mode": mode, "radius": 1, "fill_val": -7.0}
    np.testing.assert_array_equal(run("SequenceMask", inputs, **arguments)[0], wanted)
    assert_run("SequenceMask", inputs, np.where(wanted == -7, 0, X_OF_MASKS), grad=1, **arguments)
    assert_gradients("SequenceMask", inputs, [0], **{**arguments, "fill_val": 0.0})


def test_batches_and_dimensions_that_are_masked_as_a_whole() -> None:
    x = numbers(2, 3, 4, 5)
    wanted = x.copy()
    for i, j in np.ndindex(3, 4):
        if j > i:
            wanted[:, i, j] = -7
    (y,) = run(
        "SequenceMask", [x], mode="upper", axis=2, batch=0, repeat_from_axis=3, fill_val=-7.0
    )
    np.testing.assert_array_equal(y, wanted)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no mode 'middle'"):
        run("SequenceMask", [X_OF_MASKS], mode="middle")
    with pytest.raises(RuntimeError, match="no mode 'sequence'"):
        run("SequenceMask", [X_OF_MASKS], mode="sequence")


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
    limits = {"lengths": [2, 1], "min_observation": 2}
    run("GatherRangesToDense", [V, RANGES], 2, **limits, max_empty_ratio=0.5)
    with pytest.raises(RuntimeError, match="1 of 2 ranges of the output 0 are empty"):
        run("GatherRangesToDense", [V, RANGES], 2, **limits, max_empty_ratio=0.4)


def test_too_many_ranges_of_another_length_are_refused() -> None:
    run("GatherRangesToDense", [V, RANGES], 2, lengths=[2, 5], max_mismatched_ratio=0.3)
    with pytest.raises(RuntimeError, match="2 of 2 ranges of the output 1 are of a different"):
        limits = {"min_observation": 2, "max_mismatched_ratio": 0.3}
        run("GatherRangesToDense", [V, RANGES], 2, lengths=[2, 5], **limits)
