"""The recurrent operator itself: its outputs by name, parameters without named gradients, and
blobs of its steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, gradient_checker, recurrent, workspace
from poseidon.caffe2.proto import caffe2_pb2

T, N, D = 3, 2, 2


def operator() -> tuple[caffe2_pb2.OperatorDef, list[Any]]:
    """Return a network of h' = sigmoid(w h + x), and values of its inputs."""
    step = core.Net("step")
    step.AddExternalInputs("x_t", "timestep", "h_prev", "w", "b")
    step.FC(["h_prev", "w", "b"], "gates", axis=2)
    step.Sum(["gates", "x_t"], "gates")
    step.Sigmoid("gates", "h")
    operators, _ = core.GradientRegistry.GetBackwardPass(step.Proto().op, {"h": "h_grad"})
    backward = core.Net("backward")
    backward.Proto().op.extend(operators)
    links = [("h_prev", "states", 0), ("h", "states", 1), ("x_t", "x", 0)]
    back = [
        ("h_prev_grad", "states_grad", 0),
        ("h_grad", "states_grad", 1),
        ("gates_grad", "x_grad", 0),
    ]
    op = core.CreateOperator(
        "RecurrentNetwork",
        ["x", "w", "b", "h0"],
        ["all", "states", "last", "steps"],
        alias_src=["states", "states"],
        alias_dst=["all", "last"],
        alias_offset=[1, -1],
        recurrent_states=["states"],
        initial_recurrent_state_ids=[3],
        link_internal=[a for a, _, _ in links],
        link_external=[b for _, b, _ in links],
        link_offset=[c for _, _, c in links],
        backward_link_internal=[a for a, _, _ in back],
        backward_link_external=[b for _, b, _ in back],
        backward_link_offset=[c for _, _, c in back],
        param=[1, 2],
        step_net=step.Proto(),
        backward_step_net=backward.Proto(),
        outputs_with_grads=[0],
    )
    rng = np.random.RandomState(0)
    shapes = [(T, N, D), (D, D), (D,), (1, N, D)]
    return op, [rng.randn(*shape).astype(np.float32) for shape in shapes]


def run() -> np.ndarray:
    """Run the operator in a fresh workspace; return the states by numpy."""
    op, (x, w, b, h) = operator()
    workspace.ResetWorkspace()
    for name, value in zip(op.input, (x, w, b, h), strict=True):
        workspace.FeedBlob(name, value)
    workspace.RunOperatorOnce(op)
    states = [h[0]]
    for element in x:
        states.append(1 / (1 + np.exp(-(states[-1] @ w.T + b + element))))
    return np.stack(states)


def test_outputs_are_parts_of_the_states() -> None:
    states = run()
    for name, wanted in (("all", states[1:]), ("states", states), ("last", states[-1:])):
        np.testing.assert_allclose(workspace.FetchBlob(name), wanted, rtol=1e-5)


def test_gradients_of_parameters_have_the_names_of_these() -> None:
    op, values = operator()
    checker = gradient_checker.GradientChecker(0.05, 0.005, caffe2_pb2.DeviceOption(), "recurrent")
    for index in range(4):
        good, gradient, estimate = checker.CheckSimple(op, values, index, [0])
        assert good, (index, gradient, estimate)


def test_blobs_of_the_steps() -> None:
    states = run()
    fetch = core.CreateOperator(
        "RecurrentNetworkBlobFetcher", ["steps"], ["names"], prefix="seen", blob_names=["h"]
    )
    workspace.RunOperatorOnce(fetch)
    names = workspace.FetchBlob("names").tolist()
    assert names == [b"seen_h0", b"seen_h1", b"seen_h2"]
    np.testing.assert_allclose(workspace.FetchBlob("seen_h1"), states[2:3], rtol=1e-5)


def test_an_external_input_that_no_operator_reads_may_be_absent() -> None:
    op, _ = operator()
    for argument in op.arg:
        if argument.name == "step_net":
            argument.n.external_input.append("absent")
    workspace.ResetWorkspace()
    for name, value in zip(op.input, operator()[1], strict=True):
        workspace.FeedBlob(name, value)
    workspace.RunOperatorOnce(op)
    assert workspace.FetchBlob("all").shape == (T, N, D)


def test_the_blobs_of_all_steps_are_retrieved() -> None:
    states = run()
    net = core.Net("net")
    net.Proto().op.extend([operator()[0]])
    names = recurrent.retrieve_step_blobs(net, "seen")
    assert {b"seen_h0", b"seen_h2", b"seen_x_t1"} <= set(names)
    np.testing.assert_allclose(workspace.FetchBlob("seen_h1"), states[2:3], rtol=1e-5)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_has_the_element_that_the_step_writes(window: int) -> None:
    step = core.Net("sums")
    step.AddExternalInputs("x_t", "seen")
    step.Scale("x_t", "new", scale=2.0)
    step.ReduceSum("seen", "total", axes=[0], keepdims=1)
    outer = core.Net("windows")
    outer.RecurrentNetwork(
        ["x", "first", "zero"],
        ["all", "totals", "steps"],
        alias_src=["values", "sums"],
        alias_dst=["all", "totals"],
        alias_offset=[window - 1, 1],
        recurrent_states=["values", "sums"],
        initial_recurrent_state_ids=[1, 2],
        link_internal=["x_t", "seen", "new", "total"],
        link_external=["x", "values", "values", "sums"],
        link_offset=[0, 0, window - 1, 1],
        link_window=[1, window, 1, 1],
        step_net=step.Proto(),
    )
    workspace.ResetWorkspace()
    x = np.random.RandomState(0).randn(5, N, D).astype(np.float32)
    workspace.FeedBlob("x", x)
    workspace.FeedBlob("first", np.ones((window - 1, N, D), np.float32))
    workspace.FeedBlob("zero", np.zeros((1, N, D), np.float32))
    workspace.RunNetOnce(outer)
    every = np.concatenate([np.ones((window - 1, N, D)), 2 * x])
    wanted = [every[place : place + window].sum(0) for place in range(5)]
    np.testing.assert_allclose(workspace.FetchBlob("all"), 2 * x, rtol=1e-6)
    np.testing.assert_allclose(workspace.FetchBlob("totals"), wanted, rtol=1e-5, atol=1e-6)
