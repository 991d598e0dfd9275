"""The checkers of gradients and devices, and the strategies that Caffe2's tests draw from."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, device_checker, gradient_checker, workspace

X = np.array([[0.5, -1.0], [2.0, 0.3]], dtype=np.float32)


def checker() -> gradient_checker.GradientChecker:
    return gradient_checker.GradientChecker(0.01, 0.02)


@pytest.mark.parametrize(
    "kind", ["Relu", "Sigmoid", "Tanh", "Exp", "Sqr", "Scale", "Softmax", "Copy"]
)
def test_the_gradient_of_an_operator(kind: str) -> None:
    right, gradient, estimate = checker().CheckSimple(
        core.CreateOperator(kind, "x", "y"), [X], 0, [0]
    )
    assert right
    np.testing.assert_allclose(gradient, estimate, atol=0.05)


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(2, 2), (2,), (1, 2), (2, 1), ()])
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_of_broadcast_arithmetic(kind: str, shape: tuple[int, ...], which: int) -> None:
    other = np.full(shape, 1.5, dtype=np.float32)
    op = core.CreateOperator(kind, ["a", "b"], "y")
    assert checker().CheckSimple(op, [X, other], which, [0], ensure_outputs_are_inferred=True)[0]


def test_a_wrong_gradient_is_found() -> None:
    wrong = core.CreateOperator("Scale", "y_grad", "x_grad", scale=3.0)
    right, gradient, estimate = checker().CheckSimple(
        core.CreateOperator("Scale", "x", "y", scale=2.0), [X], 0, [0], grad_ops=[wrong]
    )
    assert not right
    np.testing.assert_allclose(gradient / estimate, np.full_like(X, 1.5), rtol=0.01)


def test_the_gradient_of_a_net() -> None:
    net = core.Net("checked")
    net.Sum([net.Sqr("x"), net.Exp("x")], "y")
    gradient_checker.NetGradientChecker.Check(net, ["y"], {"x": X}, "x", step_size=0.01)


def test_devices_are_alike() -> None:
    op = core.CreateOperator("Relu", "x", "y")
    options = [core.DeviceOption(0), core.DeviceOption(0)]
    assert device_checker.DeviceChecker(1e-6, options).CheckSimple(op, [X], [0])


def test_the_workspace_of_a_check_is_left_empty() -> None:
    checker().CheckSimple(core.CreateOperator("Relu", "x", "y"), [X], 0, [0])
    assert workspace.Blobs() == []


def test_an_input_may_be_a_transposed_view() -> None:
    op = core.CreateOperator("Sqr", "x", "y")
    right, _, estimate = checker().CheckSimple(op, [X.transpose()], 0, [0])
    assert right
    np.testing.assert_allclose(estimate, 2 * X.transpose() ** 3, atol=0.05)
