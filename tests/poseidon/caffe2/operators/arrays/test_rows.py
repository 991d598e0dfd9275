"""Rows that are copied, permuted, drawn or collected."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import assert_gradients, assert_run, call, numbers, run

X = numbers(5, 3)


def test_rows_become_copies_of_one() -> None:
    row = numbers(3, seed=1)
    (y,) = run("CopyRowsToTensor", [X, np.array([3, 0]), row], in_place={0: 0})
    wanted = X.copy()
    wanted[[3, 0]] = row
    np.testing.assert_array_equal(y, wanted)


def test_rows_in_another_order() -> None:
    order = np.array([2, 0, 4, 1, 3], "i4")
    np.testing.assert_array_equal(run("BatchPermutation", [X, order])[0], X[order])
    assert_gradients("BatchPermutation", [X, order], [0])


def test_a_column_is_drawn_by_weight() -> None:
    weights = np.array([[0, 0, 1], [0, 1, 0]], "f4")
    places, values = run("WeightedSample", [weights, X[:2]], 2)
    np.testing.assert_array_equal(places, [[2], [1]])
    np.testing.assert_array_equal(values, X[[0, 1], [2, 1]][:, None])
    many = np.tile(np.array([1, 3], "f4"), (4000, 1))
    (drawn,) = run("WeightedSample", [many], device_option=core.DeviceOption(0, random_seed=3))
    assert abs(drawn.mean() - 0.75) < 0.04
    assert run("WeightedSample", [np.zeros((0, 3), "f4")])[0].shape == (0,)


def test_places_are_drawn_by_cumulated_weight() -> None:
    sums = np.cumsum([1, 0, 3]).astype("f4")
    seed = core.DeviceOption(0, random_seed=3)
    (drawn,) = run("WeightedMultiSampling", [sums], num_samples=4000, device_option=seed)
    counts = np.bincount(drawn, minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.25, 0, 0.75], atol=0.04)
    assert run("WeightedMultiSampling", [sums, X])[0].shape == X.shape


@pytest.mark.parametrize("sizes", [[2, 2, 3], [5], [1, 1, 1, 1, 1]])
def test_the_last_rows_are_kept(sizes: list[int]) -> None:
    workspace.FeedBlob("kept", np.zeros(0, "f4"))
    workspace.FeedBlob("cursor", np.zeros(1, "i4"))
    workspace.FeedBlob("seen", np.zeros(1, "i8"))
    call("CreateMutex", [], ["mutex"])
    x = numbers(sum(sizes), 2)
    for part in np.split(x, np.cumsum(sizes)[:-1]):
        workspace.FeedBlob("x", part)
        inputs = ["kept", "cursor", "x", "mutex", "seen"]
        outputs = ["kept", "cursor", "seen"]
        call("LastNWindowCollector", inputs, outputs, num_to_collect=3)
    kept, total = workspace.FetchBlob("kept"), len(x)
    for place in range(total - 3, total):
        np.testing.assert_array_equal(kept[place % 3], x[place])
    assert workspace.FetchBlob("cursor")[0] == total % 3
    assert workspace.FetchBlob("seen")[0] == total


def test_each_row_has_its_number_of_largest_values() -> None:
    counts = np.array([2, 0, 1, 3, 1])
    values, indices = run("FlexibleTopK", [X, counts], 2)
    order = [np.argsort(-row)[:count] for row, count in zip(X, counts, strict=True)]
    np.testing.assert_array_equal(indices, np.concatenate(order))
    np.testing.assert_array_equal(
        values, np.concatenate([X[i, part] for i, part in enumerate(order)])
    )
    spaced = np.argsort(np.argsort(X, 1), 1).astype("f4")
    assert_gradients("FlexibleTopK", [spaced, counts], [0], 2)


def test_the_window_begins_as_an_empty_blob() -> None:
    workspace.CreateBlob("window")
    workspace.FeedBlob("next", np.array(0, dtype=np.int32))
    workspace.FeedBlob("x", X)
    names = ["window", "next"]
    call("LastNWindowCollector", [*names, "x"], names, num_to_collect=7)
    np.testing.assert_array_equal(workspace.FetchBlob("window"), X)


def test_each_row_is_in_the_reservoir_with_the_same_probability() -> None:
    size, rows, turns = 3, 12, 2000
    found = np.zeros(rows)
    names = ["kept", "visited"]
    operator = core.CreateOperator(
        "ReservoirSampling", [*names, "x", "mutex"], names, num_to_collect=size
    )
    operator.device_option.random_seed = 5
    workspace.ResetWorkspace()
    call("CreateMutex", [], ["mutex"])
    for name in (*names, "x"):
        workspace.CreateBlob(name)
    net = core.Net("reservoir")
    net.Proto().op.extend([operator])
    workspace.CreateNet(net)
    for _ in range(turns):
        workspace.FeedBlob("kept", np.zeros((0, 1), "f4"))
        workspace.FeedBlob("visited", np.zeros(1, "i8"))
        for part in (range(2), range(2, 7), range(7, rows)):
            workspace.FeedBlob("x", np.array(part, "f4")[:, None])
            workspace.RunNet(net)
        kept = workspace.FetchBlob("kept")[:, 0].astype(int)
        assert len(set(kept)) == size
        assert workspace.FetchBlob("visited")[0] == rows
        found[kept] += 1
    share = size / rows
    spread = np.sqrt(turns * share * (1 - share))  # of the number of times that a row is kept
    assert np.abs(found - turns * share).max() < 4 * spread


def test_a_reservoir_keeps_each_object_once() -> None:
    call("CreateMutex", [], ["mutex"])
    types = {"key_dtype": core.DataType.INT64, "value_dtype": core.DataType.INT32}
    call("CreateMap", [], ["places"], **types)
    workspace.FeedBlob("kept", np.zeros((0, 2), "f4"))
    workspace.FeedBlob("visited", np.zeros(1, "i8"))
    workspace.FeedBlob("owners", np.zeros(0, "i8"))
    inputs = ["kept", "visited", "x", "mutex", "ids", "places", "owners"]
    outputs = ["kept", "visited", "places", "owners"]
    operator = core.CreateOperator("ReservoirSampling", inputs, outputs, num_to_collect=4)
    visited = 0
    for turn, new in (([7, 0, 7], 2), ([0, 5], 1), ([5, 5, 9, 3, 4], 3)):
        ids = np.array(turn, "i8")
        workspace.FeedBlob("ids", ids)
        workspace.FeedBlob("x", np.stack([ids, -ids], 1).astype("f4"))
        workspace.RunOperatorOnce(operator)
        visited += new
        assert workspace.FetchBlob("visited")[0] == visited
        kept, owners = workspace.FetchBlob("kept"), workspace.FetchBlob("owners")
        np.testing.assert_array_equal(kept, np.stack([owners, -owners], 1))
        assert len(kept) == min(visited, 4)
        call("MapToKeyValue", ["places"], ["keys", "values"])
        pairs = dict(
            zip(
                workspace.FetchBlob("keys").tolist(),
                workspace.FetchBlob("values").tolist(),
                strict=True,
            )
        )
        assert pairs == {name: place for place, name in enumerate(owners.tolist())}


@pytest.mark.parametrize(
    ("outputs", "rows", "size", "message"),
    [
        (["y", "visited"], (2, 3), 4, "the outputs must be the inputs kept, visited"),
        (["kept", "visited"], (2, 3), 0, "num_to_collect is 0, expected 1 or more"),
        (["kept", "visited"], (2, 4), 4, r"the rows have the shape \(4,\)"),
    ],
)
def test_a_reservoir_that_cannot_be(
    outputs: list[str], rows: tuple[int, ...], size: int, message: str
) -> None:
    call("CreateMutex", [], ["mutex"])
    workspace.FeedBlob("kept", np.ones((1, 3), "f4"))
    workspace.FeedBlob("visited", np.ones(1, "i8"))
    workspace.FeedBlob("x", np.ones(rows, "f4"))
    inputs = ["kept", "visited", "x", "mutex"]
    with pytest.raises(RuntimeError, match=message):
        call("ReservoirSampling", inputs, outputs, num_to_collect=size)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_extend_tensor_adds_rows_of_zeros(shape: tuple[int, ...]) -> None:
    rows = numbers(*shape)
    (longer,) = run("ExtendTensor", [rows, np.array([0, 4], "i4")], in_place={0: 0})
    np.testing.assert_array_equal(longer, np.concatenate([rows, np.zeros((2, *shape[1:]))]))
    assert_run("ExtendTensor", [rows, np.array([2], "i4")], rows, in_place={0: 0})


def test_rows_with_positive_labels() -> None:
    x, labels = numbers(4, 2, 3), np.array([2, 0, -1, 1], "int32")
    np.testing.assert_array_equal(run("SampleAs", [x, labels])[0], x[[0, 3]])
    assert_gradients("SampleAs", [x, labels], [0])
