"""Adam for models: the blobs and the operators of its kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, optimizer, workspace
from poseidon.caffe2.model_helper import ModelHelper

TABLE = np.arange(1, 7, dtype=np.float32).reshape(3, 2)


def model_of(sparse: bool) -> ModelHelper:
    """Return a model with the parameter `w` and the gradient 2 w; a sparse one is of row 1."""
    workspace.ResetWorkspace()
    model = ModelHelper(name="adam")
    w = model.param_init_net.GivenTensorFill([], "w", shape=TABLE.shape, values=TABLE.flatten())
    model.AddParameter(w)
    if sparse:
        w = model.net.Gather([w, "rows"], "gathered")
    model.AddGradientOperators([model.net.SumElements(model.net.Sqr(w, "squares"), "loss")])
    return model


def train(model: ModelHelper, steps: int) -> None:
    workspace.FeedBlob("rows", np.array([1]))
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net, overwrite=True)
    workspace.RunNet(model.net, steps)


def update_of(model: ModelHelper) -> Any:
    return next(op for op in model.net.Proto().op if op.type.endswith("Adam"))


def test_smart_decay_has_the_iteration_of_the_last_gradient_of_each_row() -> None:
    model = model_of(sparse=True)
    made = optimizer.build_adam(model, 0.1, beta1=0.0, use_smart_decay=True)
    assert update_of(model).type == "SmartDecaySparseAdam"
    state = ["w_last_seen", "w_first_moment", "w_second_moment"]
    assert [str(blob) for blob in made.get_auxiliary_parameters().local] == state
    assert made.get_auxiliary_parameters().shared == ["optimizer_iteration"]
    train(model, 2)
    seen = workspace.FetchBlob("w_last_seen")
    assert seen.dtype == np.int64 and seen.tolist() == [0, 3, 0]
    w = workspace.FetchBlob("w")
    np.testing.assert_array_equal(w[[0, 2]], TABLE[[0, 2]])
    assert (w[1] < TABLE[1]).all()


def test_a_dense_update_with_smart_decay_is_that_of_adam() -> None:
    found = []
    for settings in ({}, {"use_smart_decay": True}):
        model = model_of(sparse=False)
        optimizer.build_adam(model, 0.1, **settings)
        train(model, 3)
        found.append(workspace.FetchBlob("w"))
    np.testing.assert_array_equal(*found)
    assert list(update_of(model).output)[3:] == ["w_last_seen"]
    assert workspace.HasBlob("w_last_seen")


@pytest.mark.parametrize("other", ["rowWise", "enableRAdam", "use_lr_adaption"])
def test_smart_decay_with_other_kinds_is_refused(other: str) -> None:
    with pytest.raises(NotImplementedError, match=f"Smart decay is not implemented with {other}"):
        optimizer.AdamOptimizer(use_smart_decay=True, **{other: True})


def test_a_row_has_one_second_moment() -> None:
    model = model_of(sparse=True)
    optimizer.build_adam(model, 0.1, rowWise=True)
    update = update_of(model)
    assert (update.type, update.input[2]) == ("RowWiseSparseAdam", "w_avg_second_moment")
    train(model, 1)
    assert workspace.FetchBlob("w_avg_second_moment").shape == (3,)


def test_radam_by_row_is_refused() -> None:
    model = model_of(sparse=True)
    with pytest.raises(AssertionError, match="RAdam is not implemented for rowWise Adam"):
        optimizer.build_adam(model, 0.1, rowWise=True, enableRAdam=True)


@pytest.mark.parametrize("rectified", [False, True])
def test_sparse_adam_is_told_whether_it_is_rectified(rectified: bool) -> None:
    model = model_of(sparse=True)
    optimizer.build_adam(model, 0.1, enableRAdam=rectified)
    arguments = {argument.name: argument.i for argument in update_of(model).arg}
    assert arguments["enableRAdam"] == int(rectified)
    assert isinstance(model.param_to_grad[core.BlobReference("w")], core.GradientSlice)


def test_storm_starts_at_the_sum_of_squares_that_it_is_given() -> None:
    model = model_of(sparse=False)
    optimizer.build_storm(model, 0.1, grad_sq_init=0.5)
    workspace.RunNetOnce(model.param_init_net)
    assert workspace.FetchBlob("w_grad_sq_sum").tolist() == [0.5]


def test_the_step_of_rms_prop_is_not_a_part_of_its_state() -> None:
    made = optimizer.build_rms_prop(model_of(sparse=False), 0.1)
    state = [str(blob) for blob in made.get_auxiliary_parameters().local]
    assert state == ["w_mean_squares", "w_momentum"]


def test_decay_adagrad_is_adagrad_for_sparse_gradients() -> None:
    model = model_of(sparse=True)
    optimizer.build_decay_adagrad(model, 0.1, epsilon=0.0)
    train(model, 1)
    w = workspace.FetchBlob("w")
    np.testing.assert_array_equal(w[[0, 2]], TABLE[[0, 2]])
    np.testing.assert_allclose(w[1], TABLE[1] - 0.1, rtol=1e-6)
