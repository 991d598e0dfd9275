"""Blobs that share names: fewer of them, the same results, and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, core, memonger, model_helper, workspace
from poseidon.caffe2.proto import caffe2_pb2


def names(proto: Any) -> set[str]:
    return {name for op in proto.op for name in (*op.input, *op.output)}


def chain(net_type: str = "simple") -> Any:
    """Five layers in the scope x, with gradients; the last activation is in place."""
    model = model_helper.ModelHelper(name="chain")
    model.Proto().type, model.Proto().num_workers = net_type, 4
    with core.NameScope("x"):
        blob = "data"
        for layer in range(1, 6):
            blob = brew.fc(model, blob, f"fc{layer}", 6, 6)
        soft = blob.Relu([], blob).Softmax([], "pred")
        soft.LabelCrossEntropy(["label"], ["xent"]).AveragedLoss([], "loss")
    model.AddGradientOperators(["x/loss"])
    return model


def branches(with_gradients: bool) -> Any:
    """A dag with two branches between fc1 and their sum, and a second head on one of them."""
    model = model_helper.ModelHelper(name="branches")
    model.Proto().type, model.Proto().num_workers = "dag", 4
    with core.NameScope("x"):
        trunk = brew.fc(model, "data", "fc1", 6, 6)
        ends = []
        for branch in "ab":
            blob = trunk
            for layer in range(2, 5):
                blob = brew.fc(model, blob, f"fc{layer}{branch}", 6, 6)
            ends.append(blob)
        for number, blob in enumerate([brew.sum(model, ends, "sum"), ends[0]], 1):
            soft = blob.Relu([], f"relu{number}").Softmax([], f"pred{number}")
            soft.LabelCrossEntropy(["label"], [f"xent{number}"]).AveragedLoss([], f"loss{number}")
    if with_gradients:
        model.AddGradientOperators(["x/loss1", "x/loss2"])
    return model


def results(model: Any, proto: Any, fetched: list[str]) -> list[list[float]]:
    """What a net computes, in a workspace that has nothing but parameters and inputs."""
    workspace.ResetWorkspace()
    random = np.random.RandomState(0)
    workspace.RunNetOnce(model.param_init_net)
    for name in model.params:
        shape = workspace.FetchBlob(name).shape
        workspace.FeedBlob(name, random.randn(*shape).astype(np.float32))
    workspace.FeedBlob("x/data", random.randn(4, 6).astype(np.float32))
    workspace.FeedBlob("x/label", np.int32([0, 1, 2, 5]))
    workspace.CreateNet(proto, overwrite=True)
    for _ in range(2):
        workspace.RunNet(proto.name)
    return [workspace.FetchBlob(name).tolist() for name in fetched]


def test_blobs_that_must_not_share() -> None:
    model = chain()
    proto = memonger.share_grad_blobs(
        model.net, ["x/loss"], model.param_to_grad.values(), "x/", {"x/fc2_grad", "x/fc3_grad"}
    )
    written = [name for op in proto.op for name in op.output]
    assert written.count("x/fc2_grad") == written.count("x/fc3_grad") == 1


def test_the_head_may_be_the_gradient_of_the_loss() -> None:
    model = chain()
    by_loss, by_gradient = (
        memonger.share_grad_blobs(model.net, [head], model.param_to_grad.values(), "x/")
        for head in ("x/loss", "x/loss_autogen_grad")
    )
    assert len(names(by_gradient)) <= len(names(by_loss)) + 1
    assert memonger.share_grad_blobs(model.net, ["x/none"], [], "x/") == model.net.Proto()


def test_gradients_of_another_scope_stay() -> None:
    model = chain()
    assert memonger.share_grad_blobs(model.net, ["x/loss"], [], "y/") == model.net.Proto()


def test_branches_of_a_dag_do_not_share_with_each_other() -> None:
    model = branches(with_gradients=True)
    gradients = [str(gradient) for gradient in model.param_to_grad.values()]
    proto = memonger.share_grad_blobs(model.net, ["x/loss1", "x/loss2"], gradients, "x/")
    assert len(names(proto)) < len(names(model.net.Proto()))
    fetched = ["x/loss1", "x/loss2", *gradients]
    assert results(model, proto, fetched) == results(model, model.net.Proto(), fetched)
    renamed = dict(zip_names(model.net.Proto(), proto))
    a = {renamed[f"x/fc{layer}a_grad"] for layer in (2, 3)}
    b = {renamed[f"x/fc{layer}b_grad"] for layer in (2, 3)}
    assert not a & b


def zip_names(before: Any, after: Any) -> Iterator[tuple[str, str]]:
    for old, new in zip(before.op, after.op, strict=True):
        yield from zip(old.output, new.output, strict=True)


def test_sizes_are_preferred_where_shapes_are_known() -> None:
    net = core.Net("sizes")
    net.AddExternalInputs("loss", "a_grad", "b_grad")
    net.Copy("loss", "s/small_grad")
    net.Copy("s/small_grad", "s/large_grad")
    net.Copy("s/large_grad", "s/p")
    net.Copy("s/p", "s/q_grad")
    net.Copy("s/q_grad", "s/r")
    for size, partner in ((10, "s/small_grad"), (1000, "s/large_grad")):
        shapes = {"s/small_grad": [9], "s/large_grad": [30, 30], "s/q_grad": [size]}
        proto = memonger.share_grad_blobs(net, ["loss"], [], "s/", blob_shapes=shapes)
        renamed = dict(zip_names(net.Proto(), proto))
        assert renamed["s/q_grad"] == renamed[partner] == "s/__m0_shared"


def test_devices_do_not_share_with_each_other() -> None:
    net = core.Net("devices")
    net.AddExternalInput("loss")
    for index, device in enumerate((0, 1, 0)):
        with core.DeviceScope(core.DeviceOption(caffe2_pb2.CUDA, device)):  # type: ignore[attr-defined]
            net.Copy("loss" if index == 0 else f"{index - 1}_grad", f"{index}_grad")
    net.Copy("2_grad", "3_grad", device_option=core.DeviceOption(caffe2_pb2.CUDA, 1))  # type: ignore[attr-defined]
    proto = memonger.share_grad_blobs(net, ["loss"], [], "")
    renamed = dict(zip_names(net.Proto(), proto))
    assert renamed["0_grad"] == renamed["2_grad"] != renamed["1_grad"] == renamed["3_grad"]


def test_inference_on_a_dag() -> None:
    model = branches(with_gradients=False)
    model.net.Proto().external_output.extend(["x/loss1", "x/loss2"])
    proto = memonger.optimize_inference_for_dag(model.net, ["x/data"], "x/")
    assert len(names(proto)) < len(names(model.net.Proto()))
    fetched = ["x/loss1", "x/loss2"]
    assert results(model, proto, fetched) == results(model, model.net.Proto(), fetched)
    more = memonger.optimize_inference_for_dag(model.net, ["x/fc3a_w", "x/data"], "x/")
    assert len(names(more)) == len(names(proto))


def test_inference_refuses_gradients_and_unknown_inputs() -> None:
    with pytest.raises(AssertionError, match="inference nets only"):
        memonger.optimize_inference_for_dag(chain().net, ["x/data"], "x/")
    net = core.Net("n")
    net.Proto().op.extend([core.CreateOperator("Relu", "a", "b")])
    with pytest.raises(AssertionError, match="a not in external input"):
        memonger.optimize_inference_for_dag(net, ["a"])


def test_inference_by_the_order_of_a_simple_net() -> None:
    model = chain()
    static = [name for op in model.param_init_net.Proto().op for name in op.output]
    static += ["x/data", "x/label", "x/loss", "x/fc1_w_grad"]
    proto = memonger.optimize_inference_fast(model.Proto(), static)
    assert len(names(proto)) < len(names(model.Proto()))
    fetched = ["x/loss", "x/fc1_w_grad"]
    assert results(model, proto, fetched) == results(model, model.Proto(), fetched)
    for op in proto.op:
        assert len(set(op.output)) == len(op.output)
    assert memonger.optimize_inference_fast(proto, static) == proto
    model.Proto().type = "dag"
    assert memonger.optimize_inference_fast(model.Proto(), static) == model.Proto()


def test_an_operator_against_its_schema() -> None:
    net = core.Net("bad")
    net.AddExternalInputs("x", "s", "b", "rm", "rv")
    net.SpatialBN(["x", "s", "b", "rm", "rv"], ["y", "other", "rv", "sm", "sv"])
    with pytest.raises(RuntimeError, match="output 1, other, must be the blob of input 3"):
        memonger.optimize_inference_for_dag(net, ["x"])


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_an_operator_that_must_work_in_place(frozen: str) -> None:
    net = core.Net("freeze")
    net.IndexFreeze("a", frozen)
    net.Sum([frozen, frozen], "c")
    net.Relu("c", "d")
    net.Relu("d", "e")
    net.Sum(["e", "e"], "f")
    if frozen == "b":
        with pytest.raises(RuntimeError, match="must be the blob of input 0"):
            memonger.optimize_inference_for_dag(net, ["a"])
    else:
        proto = memonger.optimize_inference_for_dag(net, ["a"])
        assert len(names(proto)) < len(names(net.Proto())) and "a" in names(proto)
