"""Adagrad for models: operators, their arguments, and counts of updates by row."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, optimizer, workspace
from poseidon.caffe2.model_helper import ModelHelper

TABLE = np.arange(8, dtype=np.float32).reshape(4, 2) / 8


def sparse_model(shape: tuple[int, ...] = TABLE.shape) -> ModelHelper:
    """Return a model whose loss is the sum of the squares of some rows of the parameter `w`."""
    workspace.ResetWorkspace()
    model = ModelHelper(name="sparse")
    w = model.param_init_net.GivenTensorFill([], "w", shape=shape, values=TABLE.flatten()[:])
    model.AddParameter(w)
    rows = model.net.Gather([w, "rows"], "gathered")
    model.AddGradientOperators([model.net.SumElements(model.net.Sqr(rows, "squares"), "loss")])
    return model


def train(model: ModelHelper, steps: list[list[int]]) -> None:
    """Run a step with each list of rows."""
    workspace.FeedBlob("rows", np.array([0]))
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net, overwrite=True)
    for rows in steps:
        workspace.FeedBlob("rows", np.array(rows))
        workspace.RunNet(model.net)


def updates(model: ModelHelper, kind: str) -> list[tuple[list[str], dict[str, Any]]]:
    """Return inputs and numbers among the arguments of the operators of a type."""
    return [
        (list(op.input), {a.name: a.f if a.HasField("f") else a.i for a in op.arg if not a.s})
        for op in model.net.Proto().op
        if op.type == kind
    ]


def test_decay_falls_with_the_count_of_updates_of_a_row() -> None:
    model = sparse_model()
    made = optimizer.build_adagrad(
        model, 0.5, epsilon=0.1, rowWise=True, weight_decay=0.25, counter_halflife=3
    )
    state = ["w_avg_squared_sum", "w_update_counter", "w_prev_update_iter"]
    assert [str(blob) for blob in made.get_auxiliary_parameters().local] == state
    assert made.get_auxiliary_parameters().shared == ["optimizer_iteration"]
    ((inputs, settings),) = updates(model, "RowWiseSparseAdagrad")
    assert inputs[-1] == "w_update_counter"
    assert settings["counter_halflife"] == 3 and settings["weight_decay"] == 0.25

    steps = [[1, 3], [3], [0, 3], [1]]
    train(model, steps)
    w, total, count, last = TABLE.astype("f8"), np.zeros(4), np.zeros(4), np.zeros(4)
    for number, rows in enumerate(steps, 1):
        decay = 0.25 * np.where(count > 0, 3 / np.maximum(count, 1e-9), 1)[rows]
        g = 2 * w[rows] + decay[:, None] * w[rows]
        total[rows] += (g**2).mean(1)
        w[rows] -= 0.5 * g / (np.sqrt(total[rows])[:, None] + 0.1)
        count[rows] = 1 + 2.0 ** ((last[rows] - number) / 3) * count[rows]
        last[rows] = number
    for name, wanted in zip(["w", *state], (w, total, count, last), strict=True):
        np.testing.assert_allclose(workspace.FetchBlob(name), wanted, rtol=1e-4, err_msg=name)
    assert workspace.FetchBlob("w_update_counter").dtype == np.float64
    assert workspace.FetchBlob("w_prev_update_iter").dtype == np.int64


@pytest.mark.parametrize("row_wise", [False, True])
def test_updates_without_decay_are_counted_only(row_wise: bool) -> None:
    model = sparse_model()
    optimizer.build_adagrad(model, 0.5, rowWise=row_wise, counter_halflife=3)
    train(model, [[2], [2]])
    assert workspace.FetchBlob("w_prev_update_iter").tolist() == [0, 0, 2, 0]
    counted = workspace.FetchBlob("w")
    ((_, settings),) = updates(model, "RowWiseSparseAdagrad" if row_wise else "SparseAdagrad")
    assert set(settings) == {"epsilon"}
    model = sparse_model()
    optimizer.build_adagrad(model, 0.5, rowWise=row_wise)
    train(model, [[2], [2]])
    np.testing.assert_array_equal(workspace.FetchBlob("w"), counted)


def test_a_parameter_of_one_dimension_does_not_decay(caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_model((8,))
    with caplog.at_level(logging.WARNING):
        optimizer.build_adagrad(model, 0.5, weight_decay=0.25)
    assert caplog.messages == ["weight decay is not applied to w: it has one dimension"]
    assert [set(settings) for _, settings in updates(model, "SparseAdagrad")] == [{"epsilon"}]


def test_decay_of_a_dense_parameter() -> None:
    model = ModelHelper(name="dense")
    w = model.param_init_net.GivenTensorFill([], "w", shape=TABLE.shape, values=TABLE.flatten())
    model.AddParameter(w)
    model.AddGradientOperators([model.net.SumElements(model.net.Sqr(w, "squares"), "loss")])
    scale = SimpleNamespace(stepsize=2, upper_bound_iter=10, scale=0.5, to_aux=True)
    optimizer.build_adagrad(model, 0.5, epsilon=0.1, weight_decay=0.25, weight_scale=scale)
    train(model, [[]])
    g = 2.25 * TABLE
    stepped = TABLE - 0.5 * g / (np.abs(g) + 0.1)
    np.testing.assert_allclose(workspace.FetchBlob("w"), 0.5 * stepped, rtol=1e-5)
    np.testing.assert_allclose(workspace.FetchBlob("w_squared_sum"), 0.5 * g**2, rtol=1e-5)


def test_row_wise_is_for_sparse_gradients() -> None:
    model = ModelHelper(name="dense")
    model.AddParameter(model.param_init_net.ConstantFill([], "w", shape=[2, 2], value=1.0))
    model.AddGradientOperators(
        [model.net.SumElements(model.net.Sqr(core.BlobReference("w"), "squares"), "loss")]
    )
    with pytest.raises(AssertionError, match="rowWise Adagrad needs a sparse gradient"):
        optimizer.build_adagrad(model, 0.5, rowWise=True)
