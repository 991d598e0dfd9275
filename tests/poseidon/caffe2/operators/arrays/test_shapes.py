"""Reshape, flatten, transpose, tile, expand, slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, call, numbers, run

X = numbers(2, 3, 4)
INT64 = np.int64


@pytest.mark.parametrize(
    ("old", "shape", "expected"),
    [
        ((0,), (0, -1), (0, 0)),
        ((0,), (1, -1), (1, 0)),
        ((3, 0), (-1, 0), (0, 0)),
        ((3, 0), (-1, 5), (0, 5)),
        ((3, 0), (0, 7), (0, 7)),
        ((0, 0), (0, 0, 0), (0, 0, 0)),
    ],
)
def test_a_tensor_without_values_is_reshaped_and_so_is_its_gradient(
    old: tuple[int, ...], shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    net = core.Net("empty")
    net.Reshape("x", ["y", "old"], shape=shape)
    gradients = net.AddGradientOperators(["y"])
    workspace.FeedBlob("x", np.zeros(old, "f4"))
    shapes, _ = workspace.InferShapesAndTypes([net])
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("y").shape == tuple(shapes["y"]) == expected
    assert workspace.FetchBlob(gradients["x"]).shape == old
    for kind in (INT64, np.int32):
        given = run("Reshape", [np.zeros(old, "f4"), np.array(shape, kind)], 2)
        assert given[0].shape == expected
        assert given[1].dtype == kind


@pytest.mark.parametrize("shape", [(5, 5), (-1, -1), (0, 0, 5)])
@pytest.mark.parametrize("x", [X, X[:0]])
def test_an_impossible_shape_is_an_error(shape: tuple[int, ...], x: Array) -> None:
    if x.size or 0 not in shape:
        with pytest.raises(RuntimeError, match="shape"):
            run("Reshape", [x], 2, shape=shape)


@pytest.mark.parametrize(("start", "end"), [(2, 1), (-7, -1), (0, -9)])
def test_an_impossible_slice_is_an_error(start: int, end: int) -> None:
    with pytest.raises(RuntimeError, match=r"dimension 1 \(3 values\) has no slice"):
        run("Slice", [X], starts=[0, start], ends=[-1, end])


@pytest.mark.parametrize(
    ("kind", "x", "arguments", "expected"),
    [
        ("Flatten", X, {"axis": 0}, X.reshape(1, 24)),
        ("Flatten", X, {"axis": 3}, X.reshape(24, 1)),
        ("ExpandDims", X, {"dims": [0, 2, 5]}, X.reshape(1, 2, 1, 3, 4, 1)),
        ("Tile", X, {"tiles": 3, "axis": -1}, np.tile(X, (1, 1, 3))),
        ("Slice", X, {"starts": [0, -3], "ends": [-1, -2]}, X[:, 1:2]),
        ("Slice", X, {"starts": [0, 1], "ends": [-1, -3]}, X[:, 1:1]),
        ("Slice", X, {"starts": [9], "ends": [-1]}, X[2:]),
        ("EnsureDense", X, {}, X),
    ],
)
def test_values_and_gradients(
    kind: str, x: Array, arguments: dict[str, Any], expected: Array
) -> None:
    np.testing.assert_array_equal(run(kind, [x], **arguments)[0], expected)
    assert_gradients(kind, [x], [0], **arguments)


@pytest.mark.parametrize(
    ("kind", "inputs", "arguments", "expected"),
    [
        ("IsEmpty", [X[:0]], {}, True),
        ("HasElements", [X[:0]], {}, False),
        ("LengthsToShape", [np.array([3, 3], np.int32)], {}, [2, 3]),
        ("Reshape", [X[:0]], {"shape": [0, 4, 3]}, np.zeros((0, 4, 3))),
    ],
)
def test_values(kind: str, inputs: list[Array], arguments: dict[str, Any], expected: Any) -> None:
    assert_run(kind, inputs, expected, outputs=2 if kind == "Reshape" else 1, **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("Transpose", {}, [[b"a", b"c"], [b"b", b"d"]]),
        ("Slice", {"starts": [0, 1], "ends": [-1, 2]}, [[b"b"], [b"d"]]),
    ],
)
def test_strings(kind: str, arguments: dict[str, Any], expected: list[list[bytes]]) -> None:
    x = np.array([[b"a", b"b"], [b"c", b"d"]], dtype=object)
    assert run(kind, [x], **arguments)[0].tolist() == expected


def test_a_torch_tensor_that_was_fed_is_reshaped_itself() -> None:
    fed = torch.ones(4, dtype=torch.int64)
    workspace.FeedBlob("fed", fed)
    call("Reshape", ["fed"], ["fed", "old"], shape=[2, 2])
    fed[0, 1] = 5
    np.testing.assert_array_equal(workspace.FetchBlob("fed"), [[1, 5], [1, 1]])


def test_tiles_of_nothing_have_a_gradient() -> None:
    (dx,) = run("TileGradient", [np.zeros((4, 0), "f4")], tiles=2, axis=0)
    assert dx.shape == (2, 0)
