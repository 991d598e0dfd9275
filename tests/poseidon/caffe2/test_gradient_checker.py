"""The checkers of gradients and devices, and the strategies that Caffe2's tests draw from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.caffe2 import core, device_checker, gradient_checker, workspace
from tests.support.caffe2_testing import hypothesis_test_util as hu

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


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients_of_a_fully_connected_layer(which: int) -> None:
    values = [X, np.ones((3, 2), dtype=np.float32), np.zeros(3, dtype=np.float32)]
    assert checker().CheckSimple(
        core.CreateOperator("FC", ["x", "w", "b"], "y"), values, which, [0]
    )[0]


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


class TestOperators(hu.HypothesisTestCase):
    @given(x=hu.tensor(min_dim=2, max_dim=2), **hu.gcs_cpu_only)
    def test_reference(self, x: np.ndarray, gc: object, dc: list[object]) -> None:
        op = core.CreateOperator("Scale", ["x"], ["y"], scale=2.0)
        self.assertReferenceChecks(
            gc,
            op,
            [x],
            lambda x: [2 * x],
            output_to_grad="y",
            grad_reference=lambda g, outputs, inputs: [2 * g],
            ensure_outputs_are_inferred=True,
        )
        self.assertDeviceChecks(dc, op, [x], [0])

    @given(inputs=hu.tensors(n=2, max_dim=2, max_value=3))
    def test_validation(self, inputs: list[np.ndarray]) -> None:
        op = core.CreateOperator("Add", ["a", "b"], ["y"])
        self.assertValidationChecks(
            hu.cpu_do, op, inputs, lambda a, b, y: np.testing.assert_allclose(a + b, y)
        )
        with pytest.raises(AssertionError):
            self.assertRunOpRaises(hu.cpu_do, op, inputs)

    @given(
        parts=hu.lengths_tensor(max_segments=4),
        rows=hu.sparse_segmented_tensor(),
        count=st.integers(0, 3),
    )
    def test_strategies(self, parts: tuple, rows: tuple, count: int) -> None:
        data, lengths = parts
        assert len(data) == lengths.sum() and len(lengths) <= 4
        table, indices, segments = rows
        assert indices.max() < len(table) and len(indices) == len(segments)
        assert (np.diff(segments) >= 0).all()


def test_the_workspace_of_a_check_is_left_empty() -> None:
    checker().CheckSimple(core.CreateOperator("Relu", "x", "y"), [X], 0, [0])
    assert workspace.Blobs() == []


def test_an_input_may_be_a_transposed_view() -> None:
    op = core.CreateOperator("Sqr", "x", "y")
    right, _, estimate = checker().CheckSimple(op, [X.transpose()], 0, [0])
    assert right
    np.testing.assert_allclose(estimate, 2 * X.transpose() ** 3, atol=0.05)
