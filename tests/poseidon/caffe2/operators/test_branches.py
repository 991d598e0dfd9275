"""If, While and Do: what they compute, and their gradients against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import brew, core, gradient_checker, workspace
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.net_builder import NetBuilder, ops
from tests.support.caffe2_operators import call


def array(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def net_of(builder: NetBuilder) -> core.Net:
    (net,) = builder.get()
    assert isinstance(net, core.Net)
    return net


def check(net: core.Net, loss: str, inputs: dict[str, Any]) -> None:
    """Compare the gradients of all inputs of floats but `zero`, a threshold, with finite
    differences.
    """
    for name, value in inputs.items():
        if value.dtype == np.float32 and name != "zero":
            gradient_checker.NetGradientChecker.Check(net, [loss], inputs, name, 0.01, 0.01)


@pytest.mark.parametrize("condition", [True, False])
def test_the_helper_cond(condition: bool) -> None:
    workspace.FeedBlob("condition", np.array(condition))
    model, then, other = ModelHelper(name="m"), ModelHelper(name="then"), ModelHelper(name="else")
    then.net.Copy("a", "out")
    other.net.Copy("b", "out")
    for name, value in (("a", 1), ("b", 2)):
        workspace.FeedBlob(name, np.array(value))
    brew.cond(model, "condition", ["a", "b", "out"], then, other)
    workspace.RunNetOnce(model.net)
    assert workspace.FetchBlob("out") == (1 if condition else 2)


def test_the_helper_loop() -> None:
    for name, value in (("go", True), ("one", 1), ("ten", 10), ("count", 0), ("sum", 0)):
        workspace.FeedBlob(name, np.array(value))
    model, body, condition = (
        ModelHelper(name="m"),
        ModelHelper(name="body"),
        ModelHelper(name="condition"),
    )
    body.net.Add(["sum", "count"], "sum")
    condition.net.Add(["count", "one"], "count")
    condition.net.LT(["count", "ten"], "go")
    brew.loop(model, "go", ["go", "one", "ten", "count", "sum"], body, condition)
    workspace.CreateNet(model.net)
    for _ in range(2):
        workspace.FeedBlob("count", np.array(0))
        workspace.FeedBlob("sum", np.array(0))
        workspace.RunNet(model.net)
        assert workspace.FetchBlob("sum") == 45


def test_a_local_blob_is_not_seen_outside() -> None:
    workspace.FeedBlob("x", array(2))
    with NetBuilder(_use_control_ops=True, initial_scope=["x"]) as builder:
        y = ops.Copy("x", "y")
        with ops.IfNet(ops.GT(["x", ops.ConstantFill([], "zero", shape=[1], value=0.0)])):
            local = ops.Mul(["x", "x"], "local")
            ops.Add([local, "x"], y)
    workspace.RunNetOnce(net_of(builder))
    assert workspace.FetchBlob("y") == [6]
    assert not workspace.HasBlob("local")


def test_a_do_continues_in_the_workspace_of_a_different_one() -> None:
    first, second, net = core.Net("first"), core.Net("second"), core.Net("outer")
    first.GivenTensorFill([], "x", shape=[1], values=[1.0])
    second.Add(["x", "x"], "z")
    net.CreateScope([], "w")
    net.Do("w", "w", net=first.Proto(), inner_blobs=[], outer_blobs_idx=[])
    inner = {"net": second.Proto(), "inner_blobs": ["z"], "outer_blobs_idx": [0]}
    net.Do("w", ["out", "w"], reuse_workspace=True, **inner)
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob("out") == [2]


def test_a_blob_that_nobody_makes_is_refused() -> None:
    with pytest.raises(AssertionError, match="Input blob nobody is undefined"):  # noqa: SIM117
        with NetBuilder(_use_control_ops=True), ops.IfNet(ops.Const(True)):
            ops.Copy("nobody", "y")


@pytest.mark.parametrize("x", [1.5, -1.5])
def test_gradients_of_branches(x: float) -> None:
    """The else branch leaves `w` alone, the other one `v`; `y` stays what it was or is changed
    in place.
    """
    names = ["x", "w", "v", "zero", "y"]
    with NetBuilder(_use_control_ops=True, initial_scope=names) as builder:
        z = ops.ConstantFill([], "z", shape=[1])
        ops.Scale("y", "t", scale=2.0)
        with ops.IfNet(ops.GT(["x", "zero"])):
            product = ops.Mul(["x", "w"], "product")
            ops.Mul([product, product], z)
            ops.Add(["t", product], "t")
        with ops.Else():
            ops.Mul(["x", "v"], z)
        ops.Add([ops.Mul(["z", "z"], "zz"), "t"], "loss")
    inputs = {"x": array(x), "w": array(0.7), "v": array(0.4), "zero": array(0), "y": array(0.3)}
    check(net_of(builder), "loss", inputs)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_gradients_of_a_loop(steps: int) -> None:
    """A recurrent net: the state goes from step to step, the weights have a part in each, one
    step is conditional.
    """
    names = ["h", "w", "u", "steps", "zero"]
    with NetBuilder(_use_control_ops=True, initial_scope=names) as builder:
        count = ops.Const(0, blob_out="count")
        one = ops.Const(1, blob_out="one")
        state = ops.Scale("h", "state", scale=1.0)
        side = ops.Scale("u", "side", scale=1.0)
        with ops.WhileNet():
            with ops.Condition():
                ops.LT([count, "steps"])
            ops.Add([count, one], count)
            now = ops.Scale(state, "now", scale=1.0)  # each iteration has its own
            product = ops.Mul([now, "w"], "product")
            new = ops.Tanh(product, "new")
            with ops.IfNet(ops.GT([new, "zero"])):
                ops.Add([side, new], side)
            ops.Add([new, "u"], state)
        ops.Add([ops.Mul([state, state], "square"), side], "loss")
    inputs = {
        "h": array(0.8),
        "w": array(0.6),
        "u": array(-0.3),
        "zero": array(0.2),
        "steps": np.array(steps),
    }
    check(net_of(builder), "loss", inputs)


def test_a_net_with_gradients_of_a_loop_runs_again_and_again() -> None:
    with NetBuilder(_use_control_ops=True, initial_scope=["x", "n"]) as builder:
        count, one = ops.Const(0, blob_out="count"), ops.Const(1, blob_out="one")
        power = ops.Scale("x", "power", scale=1.0)
        with ops.WhileNet():
            with ops.Condition():
                ops.LT([count, "n"])
            ops.Add([count, one], count)
            now = ops.Scale(power, "now", scale=1.0)
            ops.Mul([now, "x"], power)
    net = net_of(builder)
    gradients = net.AddGradientOperators(["power"])
    workspace.FeedBlob("x", array(1))
    workspace.FeedBlob("n", np.array(0))
    workspace.CreateNet(net)
    for n, x in ((2, 1.5), (0, 2.0), (3, 0.5), (2, 1.5)):
        workspace.FeedBlob("x", array(x))
        workspace.FeedBlob("n", np.array(n))
        workspace.RunNet(net)
        np.testing.assert_allclose(workspace.FetchBlob("power"), [x ** (n + 1)], rtol=1e-5)
        np.testing.assert_allclose(workspace.FetchBlob(gradients["x"]), [(n + 1) * x**n], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_blobs_idx": [7]}, "must be from 0 to 1"),
        ({"inner_blobs": ["a", "a"]}, "must differ"),
    ],
)
def test_a_wrong_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    inner = core.Net("inner")
    inner.Copy("a", "b")
    workspace.FeedBlob("x", array(1))
    settings = {"inner_blobs": ["a"], "outer_blobs_idx": [0], "net": inner.Proto(), **arguments}
    net = core.Net("outer")
    net.CreateScope([], "ws")
    net.Do(["x", "ws"], ["y", "ws"], **settings)
    with pytest.raises(RuntimeError, match=message):
        workspace.CreateNet(net)


def test_a_gradient_without_a_forward_run_is_an_error() -> None:
    call("CreateScope", [], ["ws"])
    call("HasScope", ["ws"], ["has"])
    assert not workspace.FetchBlob("has")
    op = core.CreateOperator(
        "Do", ["ws"], ["ws"], net=core.Net("n").Proto(), inner_blobs=[], outer_blobs_idx=[]
    )
    op.is_gradient_op = True
    with pytest.raises(RuntimeError, match="no workspace of a forward run"):
        workspace.RunOperatorOnce(op)
