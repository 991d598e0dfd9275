"""Nets of Caffe2 as ONNX models, and back by the backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from poseidon.caffe2 import brew, core, workspace
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.onnx import backend, frontend
from poseidon.errors import DefinitionError, UsageError
from tests.support.caffe2_operators import numbers

X = numbers(2, 3, 8, 8)
INFO = {"data": (TensorProto.FLOAT, (1, 3, 8, 8))}


@pytest.fixture
def model() -> Any:
    """Return a net with its parameters in the workspace, and what it computes of X in y."""
    model = ModelHelper(name="small", arg_scope={"order": "NCHW"})
    x = brew.conv(model, "data", "conv", 3, 4, kernel=3, pad=1)
    x = brew.spatial_bn(model, x, "bn", 4, is_test=True)
    x = brew.max_pool(model, brew.relu(model, x, "bn"), "pool", kernel=2, stride=2)
    x = brew.concat(model, [x, model.net.Sigmoid(x, "gate")], "both", axis=1)
    x = brew.average_pool(model, x, "mean", kernel=3, stride=1, pad=1)
    y = brew.softmax(model, brew.fc(model, x, "scores", 8 * 4 * 4, 5), "y")
    model.net.AddExternalOutput(y)
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("data", X)
    workspace.RunNetOnce(model.net)
    return model


def test_a_net_goes_to_onnx_and_back(model: Any) -> None:
    made = frontend.caffe2_net_to_onnx_model(model.net.Proto(), filled(model), INFO)
    onnx.checker.check_model(made, full_check=True)
    assert made.graph.name == model.net.Proto().name
    wanted = workspace.FetchBlob("y")
    session = onnxruntime.InferenceSession(made.SerializeToString())
    np.testing.assert_allclose(session.run(["y"], {"data": X})[0], wanted, atol=1e-6)
    (found,) = backend.run_model(made, X)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def filled(model: Any) -> Any:
    """Return a net that makes the parameters that the workspace has."""
    net = core.Net("filled")
    for name in model.GetAllParams():
        net.GivenTensorFill(
            [], str(name), shape=workspace.FetchBlob(name).shape, values=workspace.FetchBlob(name)
        )
    return net


def test_the_parameters_are_initializers(model: Any) -> None:
    made = frontend.caffe2_init_net_to_initializer(filled(model))
    assert [tensor.name for tensor in made] == sorted(map(str, model.GetAllParams()))
    for tensor in made:
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensor), workspace.FetchBlob(tensor.name)
        )
    graph = frontend.caffe2_net_to_onnx_graph(model.net, filled(model), INFO)
    assert [value.name for value in graph.input] == ["data"]


def test_refusals(model: Any) -> None:
    with pytest.raises(UsageError, match="the shapes of the inputs of the net"):
        frontend.caffe2_net_to_onnx_model(model.net, filled(model))
    with pytest.raises(UsageError, match="has no input 'picture'; it has data"):
        frontend.caffe2_net_to_onnx_model(model.net, filled(model), {"picture": (1, (1,))})
    net = core.Net("odd")
    net.BatchBucketize(["data", "i", "b", "l"], "y")
    info = dict.fromkeys(("data", "i", "b", "l"), (1, (2,)))
    with pytest.raises(
        DefinitionError, match=r"no other format has these operators .*BatchBucketize"
    ):
        frontend.caffe2_net_to_onnx_model(net, None, info)
