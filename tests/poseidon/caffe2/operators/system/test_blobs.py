"""Counters, atomic numbers and booleans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace


def call(kind: str, inputs: list[str], outputs: list[str], **arguments: Any) -> Any:
    workspace.RunOperatorOnce(core.CreateOperator(kind, inputs, outputs, **arguments))
    return workspace.FetchBlob(outputs[-1]) if outputs else None


def test_a_counter() -> None:
    call("CreateCounter", [], ["c"], init_count=2)
    assert not call("CheckCounterDone", ["c"], ["done"])
    assert [bool(call("CountDown", ["c"], ["done"])) for _ in range(4)] == [False] * 2 + [True] * 2
    assert call("CheckCounterDone", ["c"], ["done"])
    call("ResetCounter", ["c"], [], init_count=5)
    assert call("CountUp", ["c"], ["before"]) == 5
    assert call("RetrieveCount", ["c"], ["now"]) == 6
    assert call("ResetCounter", ["c"], ["before"]) == 6


def test_an_atomic_sum_and_a_boolean() -> None:
    workspace.FeedBlob("n", np.array([3], np.int32))
    workspace.FeedBlob("more", np.array([4], np.int32))
    call("CreateMutex", [], ["m"])
    assert call("AtomicFetchAdd", ["m", "n", "more"], ["n", "before"]) == [3]
    assert workspace.FetchBlob("n") == [7]
    call("CreateAtomicBool", [], ["flag"])
    for condition in (False, True, False):
        workspace.FeedBlob("condition", np.array(condition))
        call("ConditionalSetAtomicBool", ["flag", "condition"], [])
        assert call("CheckAtomicBool", ["flag"], ["value"]) == (
            condition or workspace.FetchBlob("value")
        )
    assert workspace.FetchBlob("value")


@pytest.fixture(autouse=True)
def fresh() -> None:
    workspace.FeedBlob("x", np.array([1, -2], dtype=np.float32))


def double(inputs: list[Any], outputs: list[Any]) -> None:
    outputs[0].reshape(inputs[0].shape)
    outputs[0].data[...] = inputs[0].data * 2


def double_gradient(inputs: list[Any], outputs: list[Any]) -> None:
    outputs[0].feed(inputs[2].data * 2)


def test_a_function_and_its_gradient() -> None:
    net = core.Net("python")
    net.Python(double, double_gradient)(["x"], ["y"])
    net.AddGradientOperators(["y"])
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("y").tolist() == [2, -4]
    assert workspace.FetchBlob("x_grad").tolist() == [2, 2]


def test_an_error_of_the_function_comes_out_as_it_is() -> None:
    def fails(inputs: list[Any], outputs: list[Any]) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        workspace.RunOperatorOnce(core.CreatePythonOperator(fails, ["x"], []))


def test_a_builder_is_called_once_for_each_operator() -> None:
    made: list[str] = []

    def builder(name: str, *, extra: int) -> Any:
        made.append(name)
        return lambda inputs, outputs: outputs[0].feed(inputs[0].data + extra)

    net = core.Net("built")
    net.Python((builder, ["one"], {"extra": 3}))(["x"], ["y"])
    assert made == []
    copy = net.Clone("copy")
    workspace.CreateNet(copy)
    workspace.RunNet(copy, 3)
    assert made == ["one"]
    assert workspace.FetchBlob("y").tolist() == [4, 1]


def test_the_workspace_is_passed_where_it_is_asked_for() -> None:
    found: list[object] = []
    net = core.Net("sees")
    net.Python(
        lambda inputs, outputs, ws: found.append(ws.blobs["x"].fetch().tolist()),
        pass_workspace=True,
    )([], [])
    workspace.RunNetOnce(net)
    assert found == [[1, -2]]


def test_gradients_of_some_inputs_and_outputs() -> None:
    counts: list[tuple[int, int]] = []

    def forward(inputs: list[Any], outputs: list[Any]) -> None:
        for x, y in zip(inputs, outputs, strict=True):
            y.feed(x.data)

    def backward(inputs: list[Any], outputs: list[Any]) -> None:
        counts.append((len(inputs), len(outputs)))
        outputs[0].feed(inputs[-1].data)

    net = core.Net("indices")
    net.Python(forward, backward, grad_output_indices=[1], grad_input_indices=[0])(
        ["x", "x"], ["y", "z"]
    )
    gradients = net.AddGradientOperators(["z"])
    workspace.RunNetOnce(net)
    assert counts == [(5, 1)]
    assert gradients["x"] == "x_grad"
