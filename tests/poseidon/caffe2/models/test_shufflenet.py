"""ShuffleNet V2: its parameters, its shapes, and a step of training."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import brew, model_helper, workspace
from poseidon.caffe2.models import shufflenet


def build(is_test: bool = False, **options: bool) -> model_helper.ModelHelper:
    workspace.ResetWorkspace()
    model = model_helper.ModelHelper(name="shufflenet", arg_scope={"order": "NCHW"})
    builder = shufflenet.ShuffleNetV2Builder(model, "data", 3, 10, is_test=is_test, **options)
    scores, labels = builder.create()
    assert (str(scores), labels) == ("last_out_L10", 10)
    return model


def test_the_parameters_are_those_of_the_paper() -> None:
    """The paper's 2.3 million for 1000 labels, with the biases that Caffe2's convolutions have."""
    model = model_helper.ModelHelper(name="shufflenet")
    shufflenet.create_shufflenet(model, "data", 3, 1000, no_loss=True)
    shapes, _ = workspace.InferShapesAndTypes([model.param_init_net])
    count = sum(int(np.prod(shapes[str(param)])) for param in model.params)
    assert 2.25e6 < count < 2.35e6


@pytest.mark.parametrize("options", [{}, {"detection": True}, {"use_bn": False}])
def test_shapes(options: dict[str, bool]) -> None:
    model = build(**options)
    shapes, _ = workspace.InferShapesAndTypes(
        [model.param_init_net, model.net], {"data": [2, 3, 224, 224]}, nets_proto=False
    )
    assert shapes["pool_1"] == [2, 24, 55, 55]
    assert shapes["stage_2_stride2_1_shuffled"] == [2, 116, 28, 28]
    assert shapes["stage_4_stride1_3_shuffled"] == [2, 464, 7, 7]
    assert shapes["last_out_L10"] == [2, 10]


def test_it_learns_a_batch() -> None:
    model = model_helper.ModelHelper(name="shufflenet")
    _, loss = shufflenet.create_shufflenet(model, "data", 3, 4, label="label")
    model.AddGradientOperators([loss])
    rate = model.param_init_net.ConstantFill([], "rate", shape=[1], value=-0.02)
    one = model.param_init_net.ConstantFill([], "one", shape=[1], value=1.0)
    brew.iter(model, "iter")
    for param in model.GetParams():
        model.WeightedSum([param, one, model.param_to_grad[param], rate], param)
    workspace.FeedBlob("data", np.random.default_rng(0).normal(size=(8, 3, 64, 64)).astype("f4"))
    workspace.FeedBlob("label", np.arange(8, dtype=np.int32) % 4)
    workspace.RunNetOnce(model.param_init_net)
    workspace.CreateNet(model.net)
    losses = []
    for _ in range(8):
        workspace.RunNet(model.net)
        losses.append(float(workspace.FetchBlob(loss)))
    assert losses[-1] < 0.7 * losses[0]
