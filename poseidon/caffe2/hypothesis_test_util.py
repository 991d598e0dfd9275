"""What Caffe2's tests of operators are built on: strategies of tensors, checks against references and gradients.

Needs hypothesis, which is installed for development only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np

from poseidon.caffe2 import core, device_checker, gradient_checker, test_util, workspace
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2

hypothesis.settings.register_profile(
    "caffe2",
    hypothesis.settings(
        deadline=None,
        max_examples=20,
        suppress_health_check=list(hypothesis.HealthCheck),
    ),
)


def is_sandcastle() -> bool:
    """Return False: tests do not run in that service."""
    return False


def is_travis() -> bool:
    """Return False: tests do not run in that service."""
    return False


# Strategies.


def dims(min_value: int = 1, max_value: int = 5) -> Any:
    """Return a strategy of sizes."""
    return st.integers(min_value=min_value, max_value=max_value)


def elements_of_type(dtype: Any = np.float32, filter_: Callable[[Any], bool] | None = None) -> Any:
    """Return a strategy of values of a type; floats are between -1 and 1.

    Raises:
        ValueError: there is none for the type.
    """
    elements: Any
    if dtype in (np.float16, np.float32, np.float64):
        width: Any = {np.float16: 16, np.float32: 32, np.float64: 64}[dtype]
        elements = st.floats(min_value=-1.0, max_value=1.0, width=width, allow_subnormal=False)
    elif dtype is np.int32:
        elements = st.integers(min_value=0, max_value=2**31 - 1)
    elif dtype is np.int64:
        elements = st.integers(min_value=0, max_value=2**63 - 1)
    elif dtype in (bool, np.bool_):
        elements = st.booleans()
    else:
        raise ValueError(f"Unexpected dtype without elements provided: {dtype}")
    return elements if filter_ is None else elements.filter(filter_)


def arrays(dims: Any, dtype: Any = np.float32, elements: Any = None, unique: bool = False) -> Any:
    """Return a strategy of arrays of a shape."""
    return hypothesis.extra.numpy.arrays(
        dtype, dims, elements=elements_of_type(dtype) if elements is None else elements, unique=unique
    )


def tensor(
    min_dim: int = 1, max_dim: int = 4, dtype: Any = np.float32, elements: Any = None, **kwargs: Any
) -> Any:
    """Return a strategy of tensors of so many dimensions."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(lambda shape: arrays(tuple(shape), dtype, elements))


def tensor1d(min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Any = None) -> Any:
    """Return a strategy of vectors."""
    return tensor(1, 1, dtype, elements, min_value=min_len, max_value=max_len)


def segment_ids(size: int, is_sorted: bool) -> Any:
    """Return a strategy of the segment of each of `size` rows."""
    if size == 0:
        return st.just(np.empty(0, dtype=np.int32))
    if is_sorted:
        steps = arrays([size], dtype=np.int32, elements=st.booleans())
        return steps.map(lambda each: np.cumsum(each, dtype=np.int32) - each[0])
    return arrays([size], dtype=np.int32, elements=st.integers(min_value=0, max_value=2 * size))


def lengths(
    size: int, min_segments: int | None = None, max_segments: int | None = None, **kwargs: Any
) -> Any:
    """Return a strategy of lengths of segments that are `size` together."""
    least = 0 if min_segments is None else min_segments
    most = size if max_segments is None else max_segments
    assert 0 <= least <= most
    if size == 0 and most == 0:
        return st.just(np.empty(0, dtype=np.int32))
    counts = st.integers(min_value=least or (1 if size else 0), max_value=max(most, 1))
    borders = counts.flatmap(
        lambda count: st.lists(st.integers(0, size), min_size=max(count - 1, 0), max_size=max(count - 1, 0))
    )
    return borders.map(lambda cuts: np.diff([0, *sorted(cuts), size]).astype(np.int32))


def segmented_tensor(
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    is_sorted: bool = True,
    elements: Any = None,
    segment_generator: Any = segment_ids,
    allow_empty: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a strategy of tensors and of their segments."""
    generator_arguments = {"is_sorted": is_sorted} if segment_generator is segment_ids else {}
    sizes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    first = st.integers(min_value=0 if allow_empty else 1, max_value=5)
    return st.tuples(first, sizes).flatmap(
        lambda parts: st.tuples(
            arrays((parts[0], *parts[1][1:]), dtype, elements),
            segment_generator(parts[0], **generator_arguments),
        )
    )


def lengths_tensor(
    min_segments: int | None = None, max_segments: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Return a strategy of tensors and of the lengths of their segments."""

    def generator(size: int, **_: Any) -> Any:
        return lengths(size, min_segments, max_segments)

    return segmented_tensor(*args, segment_generator=generator, **kwargs)  # type: ignore[misc]


def sparse_segmented_tensor(
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    is_sorted: bool = True,
    elements: Any = None,
    allow_empty: bool = False,
    segment_generator: Any = segment_ids,
    itype: Any = np.int64,
    **kwargs: Any,
) -> Any:
    """Return a strategy of tensors, of indices into them, and of the segments of the indices."""
    generator_arguments = {"is_sorted": is_sorted} if segment_generator is segment_ids else {}
    sizes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    counts = st.integers(min_value=0 if allow_empty else 1, max_value=10)
    return st.tuples(sizes, counts).flatmap(
        lambda parts: st.tuples(
            arrays(parts[0], dtype, elements),
            arrays([parts[1]], itype, st.integers(min_value=0, max_value=parts[0][0] - 1)),
            segment_generator(parts[1], **generator_arguments),
        )
    )


def sparse_lengths_tensor(**kwargs: Any) -> Any:
    """Return a strategy of tensors, of indices into them, and of the lengths of the segments of the indices."""
    return sparse_segmented_tensor(segment_generator=lengths, **kwargs)


def tensors(
    n: int, min_dim: int = 1, max_dim: int = 4, dtype: Any = np.float32, elements: Any = None, **kwargs: Any
) -> Any:
    """Return a strategy of lists of n tensors of one shape."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(
        lambda shape: st.lists(arrays(tuple(shape), dtype, elements), min_size=n, max_size=n)
    )


def tensors1d(
    n: int, min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Any = None
) -> Any:
    """Return a strategy of lists of n vectors of one length."""
    return tensors(n, 1, 1, dtype, elements, min_value=min_len, max_value=max_len)


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


@contextlib.contextmanager
def temp_workspace(name: str = "temp_ws") -> Iterator[None]:
    """Work in a workspace that is emptied at the end."""
    with workspace.WorkspaceGuard(name):
        try:
            yield
        finally:
            workspace.ResetWorkspace()


def runOpBenchmark(
    device_option: Any, op: Any, inputs: Any, input_device_options: Any = None, iterations: int = 10
) -> list[float]:
    """Return milliseconds of one run of an operator."""
    net = caffe2_pb2.NetDef(name="op_benchmark", op=[op])
    with temp_workspace():
        runOpOnInput(device_option, op, inputs, input_device_options)
        workspace.CreateNet(net, overwrite=True)
        return workspace.BenchmarkNet(net, 1, iterations, True)


def runOpOnInput(
    device_option: Any, op: caffe2_pb2.OperatorDef, inputs: Sequence[Any], input_device_options: Any = None
) -> list[Any]:
    """Return the outputs of an operator for inputs."""
    placed = caffe2_pb2.OperatorDef()
    placed.CopyFrom(op)
    placed.device_option.CopyFrom(device_option)
    with temp_workspace():
        if len(op.input) > len(inputs):
            raise ValueError(f"must supply an input for each input on the op: {op.input} vs {len(inputs)}")
        _feed(op, inputs, device_option, input_device_options)
        workspace.RunOperatorOnce(placed)
        return list(workspace.FetchBlobs(op.output))


def _feed(op: caffe2_pb2.OperatorDef, inputs: Sequence[Any], device: Any, others: Any) -> None:
    for name, value in zip(op.input, inputs, strict=False):
        workspace.FeedBlob(name, value, (others or {}).get(name, device))


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
        """Assert that the gradient of the input `outputs_to_check` is that of finite differences."""
        checker = gradient_checker.GradientChecker(stepsize, threshold, device_option, "gradient_check")
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
            f"Gradient check for input {op.input[outputs_to_check]} failed: {gradient}, estimated {estimate}",
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
            reference: returns the expected outputs.
            threshold, atol: how far they may be apart, relative and absolute (by default the same).
            output_to_grad: an output whose gradient is given to the gradient operators.
            grad_reference: `(gradient of that output, expected outputs, inputs)` -> expected gradients of the inputs.
            outputs_to_check: indices; by default all.
            ensure_outputs_are_inferred: whether inferred shapes are checked too.
        """
        placed = caffe2_pb2.OperatorDef()
        placed.CopyFrom(op)
        placed.device_option.CopyFrom(device_option)
        with temp_workspace():
            if len(op.input) > len(inputs):
                raise ValueError(
                    f"must supply an input for each input on the op: {op.input} vs {len(inputs)}"
                )
            _feed(op, inputs, device_option, input_device_options)
            net = core.Net("opnet")
            net.Proto().op.extend([placed])
            workspace.RunNetOnce(net)
            expected = reference(*inputs)
            if not isinstance(expected, (tuple, list)):
                raise RuntimeError(
                    "You are providing a wrong reference implementation. A proper one should return a tuple/list of numpy arrays."
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
                self._assert_inferred(placed, inputs)
            if grad_reference is not None:
                assert output_to_grad is not None, (
                    "If grad_reference is set, output_to_grad has to be set as well"
                )
                with core.DeviceScope(device_option):
                    self._assertGradReferenceChecks(
                        op, inputs, expected, output_to_grad, grad_reference, threshold
                    )
            return found

    def _assert_inferred(self, op: Any, inputs: Sequence[Any]) -> None:
        given = {name: np.asarray(value) for name, value in zip(op.input, inputs, strict=False)}
        shapes, types = workspace.InferShapesAndTypes(
            [caffe2_pb2.NetDef(op=[op])],
            {name: value.shape for name, value in given.items()},
            blob_types={name: workspace.data_type_of(value.dtype) for name, value in given.items()},
        )
        for name in op.output:
            output = workspace.FetchBlob(name)
            if name in shapes:
                self.assertEqual(list(output.shape), list(shapes[name]))
                self.assertEqual(types[name], workspace.data_type_of(output.dtype))

    def _assertGradReferenceChecks(
        self,
        op: Any,
        inputs: Any,
        ref_outputs: Any,
        output_to_grad: Any,
        grad_reference: Any,
        threshold: float = 1e-4,
    ) -> None:
        index = list(op.output).index(output_to_grad)
        given = [None] * len(op.output)
        given[index] = f"{output_to_grad}_grad"  # type: ignore[call-overload]
        operators, gradients = core.GradientRegistry.GetGradientForOp(op, given)
        of_output = workspace.FetchBlob(output_to_grad)
        workspace.FeedBlob(f"{output_to_grad}_grad", of_output)
        workspace.RunOperatorsOnce(operators)
        wanted = grad_reference(ref_outputs[index], ref_outputs, inputs)
        for name, gradient, reference in zip(op.input, gradients, wanted, strict=True):
            if reference is None:
                self.assertIsNone(gradient, f"input {name} should have no gradient")
                continue
            if isinstance(gradient, core.GradientSlice):
                indices, values = workspace.FetchBlobs(gradient)
                dense = np.zeros_like(reference)
                np.add.at(dense, indices, values)
            else:
                dense = workspace.FetchBlob(gradient)
            np.testing.assert_allclose(
                dense, reference, atol=threshold, rtol=threshold, err_msg=f"Gradient {gradient}"
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
        placed = caffe2_pb2.OperatorDef()
        placed.CopyFrom(op)
        placed.device_option.CopyFrom(device_option)
        with temp_workspace():
            _feed(op, inputs, device_option, input_device_options)
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
        with self.assertRaisesRegex(exception, regexp or ""):
            runOpOnInput(device_option, op, inputs, input_device_options)
