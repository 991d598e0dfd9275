"""Workspaces: blobs, nets, errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import call


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    workspace.SwitchWorkspace("default")


def test_a_net_runs_over_the_blobs() -> None:
    net = core.Net("runs")
    x = net.AddExternalInput("x")
    y = net.Scale(net.Relu(x), "y", scale=2.0)
    workspace.FeedBlob("x", np.array([-1, 2], dtype=np.float32))
    workspace.CreateNet(net)
    assert workspace.RunNet(net)
    assert workspace.FetchBlob(y).tolist() == [0, 4]
    workspace.FeedBlob("x", np.array([3, -4, 5], dtype=np.float32))
    workspace.RunNet(net.Proto().name)
    assert workspace.FetchBlob(y).tolist() == [6, 0, 10]


def test_fed_arrays_are_copied_and_tensors_shared() -> None:
    array = np.zeros(2, dtype=np.float32)
    tensor = torch.zeros(2)
    workspace.FeedBlob("array", array)
    workspace.FeedBlob("tensor", tensor)
    array[0] = tensor[0] = 1
    assert workspace.FetchBlob("array").tolist() == [0, 0]
    assert workspace.FetchBlob("tensor").tolist() == [1, 0]


def test_a_failing_operator_is_shown_with_its_definition(caplog: pytest.LogCaptureFixture) -> None:
    # GlobalInit may have raised it
    caplog.set_level(logging.WARNING, logger="poseidon.caffe2.workspace")
    net = core.Net("fails")
    net.Add(["a", "b"], "c")
    workspace.FeedBlob("a", np.zeros(2, dtype=np.float32))
    workspace.FeedBlob("b", np.zeros(3, dtype=np.float32))
    with pytest.raises(RuntimeError, match=r'(?s)Error from operator:.*type: "Add"'):
        workspace.RunNetOnce(net)
    assert __file__ in caplog.text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Relo", "there is no operator Relo; the nearest are Relu"),
        ("Relu", "op Relu: Encountered a non-existing input blob: nothing"),
    ],
)
def test_a_net_that_cannot_be_made_is_one_sentence(kind: str, message: str) -> None:
    net = core.Net("wrong")
    net.Proto().op.add().CopyFrom(core.CreateOperator(kind, "nothing", "y"))
    with pytest.raises(RuntimeError, match=message):
        workspace.CreateNet(net)


def test_an_empty_blob_is_named_as_such() -> None:
    workspace.CreateBlob("empty")
    with pytest.raises(RuntimeError, match="empty is empty: no operator has given it a value"):
        call("Relu", "empty", "y")
    assert (
        workspace.FetchBlob("empty")
        == b"empty, a C++ native class of type nullptr (uninitialized)."
    )


def test_workspaces_are_apart() -> None:
    workspace.FeedBlob("x", "text")
    with workspace.WorkspaceGuard("other"):
        assert not workspace.HasBlob("x")
    assert workspace.FetchBlob("x") == b"text"
    workspace.FeedBlob("x", "caf\udce9")  # a file's name, as os.listdir gives it
    assert workspace.FetchBlob("x") == b"caf\xe9"
    with pytest.raises(RuntimeError, match="does not exist: nowhere"):
        workspace.SwitchWorkspace("nowhere")


def test_a_step_runs_until_its_blob_says_stop() -> None:
    init, body = core.Net("init"), core.Net("body")
    init.ConstantFill([], "x", shape=[1], value=1.0)
    init.ConstantFill([], "stop", shape=[1], value=False, dtype=core.DataType.BOOL)
    body.Scale("x", "x", scale=2.0)
    step = core.execution_step("loop", [core.execution_step("body", body, num_iter=3)])
    plan = core.Plan("plan")
    plan.AddStep(core.execution_step("init", init))
    plan.AddStep(step)
    workspace.RunPlan(plan)
    assert workspace.FetchBlob("x") == 8


@pytest.mark.parametrize("value", [None, 3.5, [1, 2], np.float32(2)])
def test_what_is_no_array_is_refused_with_what_is_expected(value: object) -> None:
    with pytest.raises(RuntimeError, match=r"of type \w+: expected a numpy array"):
        workspace.FeedBlob("x", value)


def test_arrays_of_the_other_byte_order_are_fed() -> None:
    workspace.FeedBlob("x", np.array([1, 2.5], ">f4"))
    np.testing.assert_array_equal(workspace.FetchBlob("x"), np.array([1, 2.5], "float32"))


@pytest.mark.parametrize(
    ("kind", "shapes", "arguments", "message"),
    [
        ("FC", [(2, 3), (4, 5), (4,)], {}, r"X \[2, 3\] has 3 values from axis 1 on, W takes 5"),
        (
            "Conv",
            [(1, 1, 4, 4), (1, 1, 3, 3)],
            {"kernel": 3, "order": "CHW"},
            "expected NCHW or NHWC",
        ),
    ],
)
def test_shapes_and_orders_that_do_not_fit_are_named(
    kind: str, shapes: list[tuple[int, ...]], arguments: dict[str, object], message: str
) -> None:
    names = [f"in{i}" for i in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        workspace.FeedBlob(name, np.ones(shape, "float32"))
    with pytest.raises(RuntimeError, match=message):
        call(kind, names, ["y"], **arguments)


@pytest.mark.parametrize(
    ("kind", "labels", "arguments", "message"),
    [
        ("SoftmaxWithLoss", np.zeros(3, "int32"), {}, "3 labels are given for 2 examples"),
        ("Gather", np.zeros(1, "float32"), {}, "indices must be int32 or int64, not torch.float32"),
        ("Cast", None, {"to": 99}, "there are no tensors of the data type 99"),
        ("Cast", None, {"to": "flaot"}, "there is no data type flaot"),
        ("FC", np.zeros((4, 3), "int64"), {}, r"has the inputs x \(2, 3\), second \(4, 3\) int64"),
    ],
)
def test_types_and_counts_that_do_not_fit_are_named(
    kind: str, labels: np.ndarray | None, arguments: dict[str, object], message: str
) -> None:
    workspace.FeedBlob("x", np.ones((2, 3), "float32"))
    workspace.FeedBlob("b", np.ones(4, "float32"))
    if labels is not None:
        workspace.FeedBlob("second", labels)
    inputs = ["x", "second", "b"][: {"Cast": 1, "FC": 3}.get(kind, 2)]
    outputs = ["y", "loss"][: 2 if kind == "SoftmaxWithLoss" else 1]
    with pytest.raises(RuntimeError, match=message):
        call(kind, inputs, outputs, **arguments)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "Abs",
            np.array([b"a"], object),
            r"\] x is a tensor of strings, expected numbers; .* x \(1,\) string$",
        ),
        ("Softmax", np.array(["a"]), r"\] x is a tensor of strings, expected numbers; "),
        ("NHWC2NCHW", np.ones(3, "float32"), r"\] x has the shape .3,., expected .*; .* x \(3,\)$"),
        (
            "ResetCounter",
            np.ones(3, "float32"),
            r"\] x is of type Tensor, expected another type of blob; ",
        ),
        ("Abs", None, r"\] x is of type Counter, expected another type of blob$"),
        (
            "LRN",
            np.ones((1, 1, 2, 2), "float32"),
            r"\] the size of an input, or an argument, is 0; ",
        ),
    ],
)
def test_inputs_of_another_kind_are_one_sentence(
    kind: str, given: np.ndarray | None, message: str
) -> None:
    if given is None:
        call("CreateCounter", [], ["x"])
    else:
        workspace.FeedBlob("x", given)
    with pytest.raises(RuntimeError, match=r"\A\[enforce fail") as caught:
        call(kind, ["x"], ["y"])
    assert re.search(message, str(caught.value).splitlines()[0])


@pytest.mark.parametrize("arguments", [{"dtype": 77}, {"kind": "GivenTensorFill", "values": [1.0]}])
def test_fillers_with_a_wrong_type_or_number_of_values_are_named(
    arguments: dict[str, object],
) -> None:
    kind = arguments.pop("kind", "ConstantFill")
    message = (
        "data type 77" if kind == "ConstantFill" else r"1 values are given for the shape \[2, 3\]"
    )
    with pytest.raises(RuntimeError, match=message):
        call(kind, [], ["y"], shape=[2, 3], **arguments)


@pytest.mark.parametrize(
    "run", [workspace.RunNetOnce, workspace.CreateNet, workspace.RunPlan, workspace.RunOperatorOnce]
)
def test_a_name_in_the_place_of_a_net_is_one_sentence(run: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^Expected an? (net|object) or the bytes of a \w+Def"):
        run("train")


def test_a_net_or_a_blob_that_is_none_is_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"^Can't find net nothing$"):
        workspace.BenchmarkNet("nothing", 1, 1, True)
    with pytest.raises(RuntimeError, match=r"^Expected an object or the bytes of a BlobProto"):
        workspace.DeserializeBlob("x", b"garbage")
    assert not workspace.HasBlob("x")


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("SoftmaxWithLoss", 3, "the label 3 is not one of 0 to 2"),
        ("SoftmaxWithLoss", -1, "the label -1 is not one of 0 to 2"),
        ("Gather", 7, "the index 7 is not one of the axis 0, 0 to 1"),
    ],
)
def test_labels_and_indices_out_of_range_are_named(kind: str, wrong: int, message: str) -> None:
    workspace.FeedBlob("x", np.ones((2, 3), "float32"))
    workspace.FeedBlob("chosen", np.array([0, wrong], "int32"))
    outputs = ["y", "loss"][: 2 if kind == "SoftmaxWithLoss" else 1]
    with pytest.raises(RuntimeError, match=message):
        call(kind, ["x", "chosen"], outputs)
