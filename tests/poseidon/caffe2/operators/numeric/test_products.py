"""Products of matrices, affine functions and Dropout against numpy, gradients by finite
differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, tt_core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

Shape = tuple[int, ...]


@pytest.mark.parametrize("axis", [1, 2])
def test_transposed_layer(axis: int) -> None:
    x, b = numbers(2, 3, 4), numbers(2)
    w = numbers(12 if axis == 1 else 4, 2)
    wanted = x.reshape(*x.shape[:axis], -1) @ w + b
    assert_run("FCTransposed", [x, w, b], wanted, rtol=1e-4, atol=1e-5, axis=axis)
    assert_gradients("FCTransposed", [x, w, b], [0, 1, 2], axis=axis)


def test_matrices_are_flattened_at_their_axes() -> None:
    a, b = numbers(2, 3, 2, 2), numbers(2, 2, 3, seed=1)
    (y,) = run("MatMul", [a, b], axis_a=2, axis_b=2)
    np.testing.assert_allclose(y, a.reshape(6, 4) @ b.reshape(4, 3), rtol=1e-4, atol=1e-5)
    assert_gradients("MatMul", [a, b], [0, 1], axis_a=2, axis_b=2)


@pytest.mark.parametrize(
    ("a", "b", "arguments", "shape"),
    [
        (numbers(4), numbers(4, seed=1), {}, (1,)),
        (numbers(1), numbers(1, seed=1), {}, (1,)),
        (numbers(4), numbers(4, 3), {}, (3,)),
        (numbers(4), numbers(2, 3, 4), {"trans_b": 1}, (2, 3)),
        (numbers(3, 4), numbers(4), {}, (3,)),
        (numbers(2, 4, 3), numbers(4), {"trans_a": 1}, (2, 3)),
        (numbers(0, 3, 4), numbers(4, 2), {}, (0, 3, 2)),
    ],
)
def test_products_of_vectors(a: Array, b: Array, arguments: dict[str, int], shape: Shape) -> None:
    left = a.swapaxes(-1, -2) if "trans_a" in arguments else a
    right = b.swapaxes(-1, -2) if "trans_b" in arguments else b
    (y,) = run("BatchMatMul", [a, b], broadcast=1, **arguments)
    assert y.shape == shape
    np.testing.assert_allclose(y, (left @ right).reshape(shape), rtol=1e-4, atol=1e-5)


def test_batches_broadcast_where_it_is_asked_for() -> None:
    a, b = numbers(2, 3, 2, 4), numbers(4, 5)
    assert_run("BatchMatMul", [a, b], a @ b, rtol=1e-4, atol=1e-5, broadcast=1)
    with pytest.raises(RuntimeError, match="need broadcast"):
        run("BatchMatMul", [a, b])


@pytest.mark.parametrize("kind", ["SoftmaxWithLoss", "FCTransposed", "ElementwiseLinear"])
def test_no_rows(kind: str) -> None:
    labels = np.zeros(0, "int32")
    inputs: dict[str, Any] = {
        "SoftmaxWithLoss": [numbers(0, 3), labels],
        "FCTransposed": [numbers(0, 3), numbers(3, 2), numbers(2)],
        "ElementwiseLinear": [numbers(0, 3), numbers(3), numbers(3)],
    }
    assert run(kind, inputs[kind], 2 if kind == "SoftmaxWithLoss" else 1)[0].shape[0] == 0


def test_dropout_scales_what_it_keeps() -> None:
    x = np.ones(4000, "float32")
    workspace.FeedBlob("x", x)
    net = core.Net("dropout")
    net.Dropout(["x"], ["y", "mask"], ratio=0.25)
    gradients = net.AddGradientOperators(["y"])
    workspace.RunNetOnce(net)
    y, mask = workspace.FetchBlob("y"), workspace.FetchBlob("mask")
    assert mask.dtype == bool
    assert abs(mask.mean() - 0.75) < 0.05
    np.testing.assert_allclose(y, mask / 0.75, rtol=1e-6)
    np.testing.assert_allclose(workspace.FetchBlob(gradients["x"]), mask / 0.75, rtol=1e-6)


def test_rows_have_weights() -> None:
    x, w = numbers(4, 3), numbers(4, seed=1)
    np.testing.assert_allclose(run("RowMul", [x, w])[0], x * w[:, None], rtol=1e-6)
    assert_gradients("RowMul", [x, w], [0, 1])
    assert_run("ReduceTailSum", [numbers(2, 3, 2)], numbers(2, 3, 2).sum((1, 2)), rtol=1e-5)


def test_a_tensor_train_is_a_fully_connected_layer() -> None:
    w, x, b = numbers(6, 4), numbers(3, 4), numbers(6, seed=1)
    cores = tt_core.matrix_to_tt(w, [2, 2], [3, 2], [1, 4, 1])
    arguments = {"inp_sizes": [2, 2], "out_sizes": [3, 2], "tt_ranks": [1, 4, 1]}
    assert_run("TT", [x, b, cores], x @ w.T + b, rtol=1e-4, atol=1e-5, **arguments)
    with pytest.raises(RuntimeError, match="tt_ranks longer by 1"):
        run("TT", [x, b, cores], **{**arguments, "tt_ranks": [1, 1]})
