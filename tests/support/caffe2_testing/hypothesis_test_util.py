"""What Caffe2's tests of operators are built on: strategies of tensors, checks against
references and gradients.

Needs hypothesis, which is installed for development only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch

from poseidon.caffe2 import core, device_checker, gradient_checker, workspace
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2
from tests.support.caffe2_testing import test_util
from tests.support.caffe2_testing.references import as_reference_arrays
from tests.support.caffe2_testing.strategies import *  # noqa: F403 (under this module's name)

# torch imports seconds of code at its first operation on shapes: here, and not within the deadline
# of a test.
torch.empty(1, device="meta") + 1


def is_sandcastle() -> bool:
    """Return whether `SANDCASTLE` is 1: tests run in that service."""
    return os.environ.get("SANDCASTLE") == "1"


def is_travis() -> bool:
    """Return whether `TRAVIS` is set: tests run in that service."""
    return "TRAVIS" in os.environ


# Devices.

cpu_do = caffe2_pb2.DeviceOption()
cuda_do = caffe2_pb2.DeviceOption(device_type=DEVICE_NUMBERS["CUDA"])
hip_do = caffe2_pb2.DeviceOption(device_type=DEVICE_NUMBERS["HIP"])
gpu_do = caffe2_pb2.DeviceOption(device_type=workspace.GpuDeviceType)
_gpu_dos = [gpu_do] if workspace.has_gpu_support else []
device_options = [cpu_do, *_gpu_dos]


def _devices(options: Sequence[caffe2_pb2.DeviceOption]) -> dict[str, Any]:
    return {"gc": st.sampled_from(options or [cpu_do]), "dc": st.just(list(options))}


gcs = _devices(device_options)
gcs_cpu_only = _devices([cpu_do])
gcs_gpu_only = _devices(_gpu_dos)
gcs_cuda_only = _devices([cuda_do] if workspace.has_cuda_support else [])
gcs_no_hip = _devices([cpu_do] if workspace.has_hip_support else device_options)
gcs_ideep = gcs_cpu_only

expanded_device_options = [
    cpu_do,
    *(
        caffe2_pb2.DeviceOption(device_type=workspace.GpuDeviceType, device_id=index)
        for index in range(workspace.NumGpuDevices())
    ),
]
"""The CPU and each GPU."""


def device_checker_device_options() -> Any:
    """Return the strategy of the devices that a test compares."""
    return st.just(device_options)


def gradient_checker_device_option() -> Any:
    """Return the strategy of the device that a test checks gradients on."""
    return st.sampled_from(device_options)


@contextlib.contextmanager
def temp_workspace(name: str | bytes = "temp_ws") -> Iterator[None]:
    """Work in a workspace that is emptied at the end."""
    with workspace.WorkspaceGuard(name.decode() if isinstance(name, bytes) else name):
        try:
            yield
        finally:
            workspace.ResetWorkspace()


def runOpOnInput(
    device_option: Any,
    op: caffe2_pb2.OperatorDef,
    inputs: Sequence[Any],
    input_device_options: Any = None,
) -> list[Any]:
    """Return the outputs of an operator for inputs."""
    placed = _placed(op, device_option)
    with temp_workspace():
        if len(op.input) > len(inputs):
            raise ValueError(
                f"must supply an input for each input on the op: {op.input} vs {len(inputs)}"
            )
        _feed(placed, inputs, device_option, input_device_options)
        workspace.RunOperatorOnce(placed)
        return list(workspace.FetchBlobs(op.output))


def _placed(op: caffe2_pb2.OperatorDef, device: caffe2_pb2.DeviceOption) -> caffe2_pb2.OperatorDef:
    placed = caffe2_pb2.OperatorDef()
    placed.CopyFrom(op)
    placed.device_option.CopyFrom(device)
    return placed


def _feed(op: caffe2_pb2.OperatorDef, inputs: Sequence[Any], device: Any, others: Any) -> None:
    devices = others or core.InferOpBlobDevicesAsDict(op)[0]
    for name, value in zip(op.input, inputs, strict=False):
        workspace.FeedBlob(name, value, devices.get(name, device))


class HypothesisTestCase(test_util.TestCase):
    """A test of operators; its workspaces are named after the check, and emptied."""

    def assertDeviceChecks(
        self,
        device_options: Sequence[Any],
        op: Any,
        inputs: Sequence[Any],
        outputs_to_check: Sequence[int],
        input_device_options: Mapping[str, Any] | None = None,
        threshold: float = 0.01,
    ) -> None:
        """Assert that an operator gives the same on all devices."""
        checker = device_checker.DeviceChecker(threshold, device_options)
        self.assertTrue(checker.CheckSimple(op, inputs, outputs_to_check, input_device_options))

    def assertGradientChecks(
        self,
        device_option: Any,
        op: Any,
        inputs: Sequence[Any],
        outputs_to_check: int,
        outputs_with_grads: Sequence[int],
        grad_ops: Any = None,
        threshold: float = 0.005,
        stepsize: float = 0.05,
        input_device_options: Mapping[str, Any] | None = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> None:
        """Assert that the gradient of the input `outputs_to_check` matches finite differences."""
        checker = gradient_checker.GradientChecker(
            stepsize, threshold, device_option, "gradient_check"
        )
        right, gradient, estimate = checker.CheckSimple(
            op,
            inputs,
            outputs_to_check,
            outputs_with_grads,
            grad_ops,
            input_device_options,
            ensure_outputs_are_inferred,
        )
        self.assertEqual(gradient.shape, estimate.shape)
        self.assertTrue(
            right,
            f"Gradient check for input {op.input[outputs_to_check]} failed: {gradient}, estimated "
            f"{estimate}",
        )

    def assertReferenceChecks(
        self,
        device_option: Any,
        op: Any,
        inputs: Sequence[Any],
        reference: Callable[..., Any],
        input_device_options: Mapping[str, Any] | None = None,
        threshold: float = 1e-4,
        output_to_grad: Any = None,
        grad_reference: Any = None,
        atol: float | None = None,
        outputs_to_check: Sequence[int] | None = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> list[Any]:
        """Assert that an operator gives what a function of the inputs does; return its outputs.

        Args:
            device_option, op, inputs, input_device_options: what runs.
            reference: returns the expected outputs; see `ReferenceArray` for the inputs it gets.
            threshold, atol: how far they may be apart, relative and absolute (by default the same).
            output_to_grad: an output whose gradient is given to the gradient operators.
            grad_reference: `(gradient of that output, expected outputs, inputs)` -> expected
                gradients of the inputs: an array, None, or for a sparse one its values and its
                indices.
            outputs_to_check: indices; by default all.
            ensure_outputs_are_inferred: whether inferred shapes are checked too.
        """
        placed = _placed(op, device_option)
        with temp_workspace():
            if len(op.input) > len(inputs):
                raise ValueError(
                    f"must supply an input for each input on the op: {op.input} vs {len(inputs)}"
                )
            _feed(placed, inputs, device_option, input_device_options)
            net = core.Net("opnet")
            net.Proto().op.extend([placed])
            inferred = workspace.InferShapesAndTypes([net])
            workspace.RunNetOnce(net)
            expected = reference(*as_reference_arrays(inputs))
            if not isinstance(expected, (tuple, list)):
                raise RuntimeError(
                    "You are providing a wrong reference implementation. A proper one should "
                    "return a tuple/list of numpy arrays."
                )
            if not outputs_to_check:
                self.assertEqual(len(expected), len(op.output))
                outputs_to_check = range(len(op.output))
            found = []
            for index, wanted in zip(outputs_to_check, expected, strict=False):
                output = workspace.FetchBlob(op.output[index])
                if output.dtype.kind in "SO":
                    np.testing.assert_array_equal(output, wanted)
                else:
                    np.testing.assert_allclose(
                        output,
                        wanted,
                        atol=threshold if atol is None else atol,
                        rtol=threshold,
                        err_msg=f"Output {op.output[index]} is not matching the reference",
                    )
                found.append(output)
            if ensure_outputs_are_inferred:
                self._assert_inferred([op.output[index] for index in outputs_to_check], *inferred)
            if grad_reference is not None:
                assert output_to_grad is not None, (
                    "If grad_reference is set, output_to_grad has to be set as well"
                )
                with core.DeviceScope(device_option):
                    self._assertGradReferenceChecks(
                        op, inputs, expected, output_to_grad, grad_reference, threshold
                    )
            return found

    def _assert_inferred(
        self, names: Sequence[str], shapes: Mapping[str, Sequence[int]], types: Mapping[str, int]
    ) -> None:
        for name in names:
            self.assertIn(name, shapes, f"the shape of {name} is not inferred")
            output = workspace.FetchBlob(name)
            self.assertEqual(list(output.shape), list(shapes[name]), f"inferred shape of {name}")
            self.assertEqual(
                types[name], workspace.data_type_of(output.dtype), f"inferred type of {name}"
            )

    def _assertGradReferenceChecks(
        self,
        op: Any,
        inputs: Any,
        ref_outputs: Any,
        output_to_grad: Any,
        grad_reference: Any,
        threshold: float = 1e-4,
    ) -> None:
        given = f"{output_to_grad}_grad"
        operators, gradients = core.GradientRegistry.GetBackwardPass([op], {output_to_grad: given})
        of_output = workspace.FetchBlob(output_to_grad)
        wanted = grad_reference(of_output, ref_outputs, as_reference_arrays(inputs))
        workspace.FeedBlob(given, of_output)
        workspace.RunOperatorsOnce(operators)
        self.assertEqual(len(wanted), len(inputs))
        for name, reference in zip(op.input, wanted, strict=False):
            gradient = gradients.get(name)
            if not gradient:
                self.assertIsNone(reference, f"input {name} has no gradient")
                continue
            if isinstance(gradient, core.GradientSlice):
                values, indices = reference
                pairs = [(gradient.values, values), (gradient.indices, indices)]
            else:
                pairs = [(gradient, reference)]
            for blob, expected in pairs:
                np.testing.assert_allclose(
                    workspace.FetchBlob(blob),
                    expected,
                    atol=threshold,
                    rtol=threshold,
                    err_msg=f"Gradient {blob} is not matching the reference",
                )

    def assertValidationChecks(
        self,
        device_option: Any,
        op: Any,
        inputs: Sequence[Any],
        validator: Callable[..., Any],
        input_device_options: Mapping[str, Any] | None = None,
        as_kwargs: bool = True,
        init_net: Any = None,
    ) -> None:
        """Run an operator, and a function on its inputs and outputs (by name, or as two lists)."""
        if as_kwargs:
            assert len(set(op.input).union(op.output)) == len(op.input) + len(op.output), (
                "in-place ops are not supported in as_kwargs mode"
            )
        placed = _placed(op, device_option)
        with temp_workspace():
            _feed(placed, inputs, device_option, input_device_options)
            if init_net is not None:
                workspace.RunNetOnce(init_net)
            workspace.RunOperatorOnce(placed)
            outputs = workspace.FetchBlobs(op.output)
            if as_kwargs:
                validator(**dict(zip([*op.input, *op.output], [*inputs, *outputs], strict=False)))
            else:
                validator(inputs=inputs, outputs=outputs)

    def assertRunOpRaises(
        self,
        device_option: Any,
        op: Any,
        inputs: Sequence[Any],
        input_device_options: Mapping[str, Any] | None = None,
        exception: Any = (Exception,),
        regexp: str | None = None,
    ) -> None:
        """Assert that an operator fails."""
        placed = _placed(op, device_option)
        with temp_workspace():
            _feed(placed, inputs, device_option, input_device_options)
            with self.assertRaisesRegex(exception, regexp or ""):
                workspace.RunOperatorOnce(placed)
