"""Single Caffe2 operators, run on arrays; their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe2 import core, gradient_checker, workspace
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.bind import misfit
from poseidon.caffe2.workspace.current import current

Array = NDArray[Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    """Return normal numbers, none of them near zero."""
    values = np.random.RandomState(seed + 17 * len(shape)).randn(*shape)
    return (values + 0.1 * np.sign(values)).astype("float32")


def call(kind: str, inputs: Any, outputs: Any, **arguments: Any) -> bool:
    """Run an operator on blobs of the current workspace."""
    return workspace.RunOperatorOnce(core.CreateOperator(kind, inputs, outputs, **arguments))


def run(
    kind: str,
    inputs: Sequence[Array],
    outputs: int = 1,
    in_place: dict[int, int] | None = None,
    **arguments: Any,
) -> list[Array]:
    """Return the outputs of an operator.

    Args:
        kind: its type.
        inputs: its inputs.
        outputs: their number.
        in_place: the input whose blob each of these outputs is.
        arguments: its arguments.
    """
    names = [f"x{index}" for index in range(len(inputs))]
    shared = in_place or {}
    results = [names[shared[index]] if index in shared else f"y{index}" for index in range(outputs)]
    workspace.ResetWorkspace()
    for name, value in zip(names, inputs, strict=True):
        workspace.FeedBlob(name, value)
    op = core.CreateOperator(kind, names, results, **arguments)
    unexpected = misfit(op, [current().get(name).value for name in names])
    assert workspace.RunOperatorOnce(op)
    assert unexpected == ""  # what an operator takes, its line of shapes allows
    return [workspace.FetchBlob(name) for name in results]


def assert_run(
    kind: str,
    inputs: Sequence[Array],
    *expected: Any,
    rtol: float | None = None,
    atol: float = 0.0,
    outputs: int | None = None,
    in_place: dict[int, int] | None = None,
    **arguments: Any,
) -> None:
    """Compare the first outputs of an operator with arrays: exactly, or with tolerances.

    Args:
        kind, inputs, in_place, arguments: see `run`.
        expected: the arrays.
        rtol, atol: the tolerances; by default values are equal.
        outputs: the number of outputs; by default of the arrays.
    """
    found = run(kind, inputs, len(expected) if outputs is None else outputs, in_place, **arguments)
    for value, wanted in zip(found, expected, strict=False):
        if rtol is None:
            np.testing.assert_array_equal(value, wanted)
        else:
            np.testing.assert_allclose(value, wanted, rtol=rtol, atol=atol)


def assert_gradients(
    kind: str,
    inputs: Sequence[Array],
    wanted: Sequence[int],
    outputs: int = 1,
    through: Sequence[int] = (0,),
    **arguments: Any,
) -> None:
    """Compare the gradients of inputs with finite differences.

    Args:
        kind: the type of the operator.
        inputs: its inputs.
        wanted: the inputs whose gradients are compared.
        outputs: the number of its outputs.
        through: the outputs that have gradients.
        arguments: its arguments.
    """
    workspace.ResetWorkspace()
    names, results = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(outputs)]
    op = core.CreateOperator(kind, names, results, **arguments)
    checker = gradient_checker.GradientChecker(0.01, 0.01, caffe2_pb2.DeviceOption(), "opgradient")
    for index in wanted:
        good, gradient, estimate = checker.CheckSimple(op, list(inputs), index, list(through))
        assert good, (kind, index, gradient, estimate)
