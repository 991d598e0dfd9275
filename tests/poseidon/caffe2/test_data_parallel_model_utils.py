"""A model of several layers whose last ones are on other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, data_parallel_model, optimizer, workspace
from poseidon.caffe2.data_parallel_model_utils import GetActivationBlobs, ShiftActivationDevices
from poseidon.caffe2.model_helper import ModelHelper
from tests.support.caffe2_operators import Array, numbers

X, LABEL = numbers(4, 6), np.array([0, 2, 1, 0], "int32")


def layers(model: Any, loss_scale: float) -> list[Any]:
    x = "data"
    for number in range(3):
        x = brew.fc(model, x, f"fc{number}", 6, 6, weight_init=("ConstantFill", {"value": 0.1}))
        x = brew.tanh(model, x, f"tanh{number}")
    _, loss = model.SoftmaxWithLoss([x, "label"], ["softmax", "loss"])
    return [model.Scale(loss, "scaled", scale=loss_scale)]


def parallel() -> Any:
    workspace.ResetWorkspace()
    model = ModelHelper(name="parts")
    data_parallel_model.Parallelize_GPU(
        model,
        input_builder_fun=lambda _: None,
        forward_pass_builder_fun=layers,
        optimizer_builder_fun=lambda m: optimizer.build_sgd(m, 0.5),
        devices=[0, 1],
    )
    return model


def trained(model: Any) -> dict[str, Array]:
    """Return the parameters after three steps."""
    for device in (0, 1):
        workspace.FeedBlob(f"gpu_{device}/data", X[2 * device : 2 * device + 2])
        workspace.FeedBlob(f"gpu_{device}/label", LABEL[2 * device : 2 * device + 2])
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net)
    workspace.RunNet(model.net, 3)
    return {str(name): workspace.FetchBlob(name) for name in model.GetParams("")}


@pytest.mark.filterwarnings("ignore:This machine has no GPU")
def test_moved_layers_compute_the_same() -> None:
    wanted = trained(parallel())
    model = parallel()
    activations = GetActivationBlobs(model)
    assert activations == ["fc0", "tanh0", "fc1", "tanh1", "fc2", "tanh2", "loss", "scaled"]
    ShiftActivationDevices(model, activations[2:], {0: 2, 1: 3})
    devices = {
        op.type: op.device_option.device_id
        for op in model.net.Proto().op
        if op.type in ("FC", "SoftmaxWithLoss", "SoftmaxWithLossGradient")
        and op.output[0].startswith("gpu_1/")
    }
    assert devices["SoftmaxWithLoss"] == devices["SoftmaxWithLossGradient"] == 3
    place = {
        op.output[0]: op.device_option.device_id
        for net in (model.net, model.param_init_net)
        for op in net.Proto().op
    }
    assert [place[f"gpu_0/fc{n}"] for n in range(3)] == [0, 2, 2]
    assert [place[f"gpu_1/fc{n}_w"] for n in range(3)] == [1, 3, 3]
    found = trained(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_device_is_old_or_new() -> None:
    model = parallel()
    with pytest.raises(ValueError, match="the device 1 is both an old and a new one"):
        ShiftActivationDevices(model, [], {0: 1, 1: 2})
