"""Gradients of operators and nets against finite differences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.proto import caffe2_pb2

log = logging.getLogger(__name__)


def getGradientForOp(op: caffe2_pb2.OperatorDef) -> tuple[list[caffe2_pb2.OperatorDef], list[Any]]:
    """Return an operator's gradient operators and input gradients, `<output>_grad` given."""
    return core.GradientRegistry.GetGradientForOp(op, [f"{name}_grad" for name in op.output])


def _get_grad_blob(grad_map: Mapping[Any, Any], input_to_check: Any) -> Any:
    gradient = grad_map[input_to_check]
    return (
        (gradient.indices, gradient.values)
        if isinstance(gradient, core.GradientSlice)
        else gradient
    )


def _dense(
    op: caffe2_pb2.OperatorDef, gradient: Any, input_to_check: int, device: Any
) -> tuple[str, list[caffe2_pb2.OperatorDef]]:
    """Return the name of the dense gradient, and the operators that make it of a sparse one."""
    if not isinstance(gradient, core.GradientSlice):
        return str(gradient), []
    name = f"{op.input[input_to_check]}_grad_dense"
    blobs = [core.BlobReference(str(blob)) for blob in (*gradient, op.input[input_to_check])]
    made = core.CreateOperator(
        "SparseToDense", blobs, [core.BlobReference(name)], device_option=device
    )
    return name, [made]


def _estimated(values: np.ndarray, step: float, loss: Callable[[], float]) -> np.ndarray:
    """Return the loss's slope by each value, from its differences as the values move in place."""
    flat, slopes = values.reshape(-1), np.zeros(values.size)
    for index in range(flat.size):
        kept = flat[index]
        losses = []
        for moved in (step, -step):
            flat[index] = kept + moved
            losses.append(loss())
        flat[index] = kept
        slopes[index] = (losses[0] - losses[1]) / step / 2
    return slopes.reshape(values.shape)


class GradientChecker:
    """Compares gradient operators with the change of a loss: half the outputs' sum of squares."""

    def __init__(
        self,
        stepsize: float,
        threshold: float,
        device_option: caffe2_pb2.DeviceOption | None = None,
        workspace_name: str = "gradient_check",
        input_device_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up a checker.

        Args:
            stepsize: the change of each value of the input.
            threshold: how far gradient and estimate may be apart, absolute and relative.
            device_option: where operators run.
            workspace_name: the workspace that they run in.
            input_device_options: devices of inputs that lie elsewhere.
        """
        self._stepsize = stepsize
        self._threshold = threshold
        self._device_option = device_option or caffe2_pb2.DeviceOption()
        self._workspace_name = workspace_name
        self._input_device_options = dict(input_device_options or {})

    def GetLossAndGrad(
        self,
        op: caffe2_pb2.OperatorDef,
        grad_ops: Iterable[caffe2_pb2.OperatorDef],
        inputs: Sequence[Any],
        input_names: Sequence[str],
        input_to_check: int,
        grad_name: Any,
        outputs_with_grads: Sequence[int],
    ) -> tuple[float, Any]:
        """Run an operator and its gradient; return the loss and the gradient of the input."""
        for name, value in zip(input_names, inputs, strict=False):
            workspace.FeedBlob(
                name, value, self._input_device_options.get(name, self._device_option)
            )
        workspace.RunOperatorOnce(op)
        loss = 0.0
        for index in outputs_with_grads:
            name = op.output[index]
            value = workspace.FetchBlob(name)
            loss += float((value.astype(np.float64) ** 2).sum())
            workspace.FeedBlob(f"{name}_grad", value, self._device_option)
        workspace.RunOperatorsOnce(grad_ops)
        return loss / 2, workspace.FetchBlob(str(grad_name))

    def CheckSimple(
        self,
        op: caffe2_pb2.OperatorDef,
        inputs: Sequence[Any],
        input_to_check: int,
        outputs_with_grads: Sequence[int],
        grad_ops: Sequence[caffe2_pb2.OperatorDef] | None = None,
        input_device_options: Mapping[str, Any] | None = None,
        ensure_outputs_are_inferred: bool = False,
    ) -> tuple[bool, Any, Any]:
        """Check the gradient of one input.

        Args:
            op: the operator.
            inputs: values of its inputs.
            input_to_check: the index of the input.
            outputs_with_grads: the outputs that the loss is made of.
            grad_ops: gradient operators, in place of the registry's.
            input_device_options: devices of inputs that lie elsewhere.
            ensure_outputs_are_inferred: whether the inferred shapes of the outputs are checked too.

        Returns:
            whether all values agree, the gradient, and its estimate.
        """
        self._input_device_options = dict(input_device_options or self._input_device_options)
        op.device_option.CopyFrom(self._device_option)
        if grad_ops is None:
            grad_ops, gradients = getGradientForOp(op)
        else:
            gradients = [f"{name}_grad" for name in op.input]
        grad_name, more = _dense(op, gradients[input_to_check], input_to_check, self._device_option)
        names = list(op.input)
        with workspace.WorkspaceGuard(self._workspace_name):
            workspace.ResetWorkspace()
            values = [
                np.array(value, order="C") if isinstance(value, np.ndarray) else value
                for value in inputs
            ]

            def run(grad_ops: Iterable[caffe2_pb2.OperatorDef] = ()) -> tuple[float, Any]:
                return self.GetLossAndGrad(
                    op, grad_ops, values, names, input_to_check, grad_name, outputs_with_grads
                )

            _, gradient = run([*grad_ops, *more])
            if ensure_outputs_are_inferred:
                self._assertInferTensorChecks(op, grad_ops)
            estimate = _estimated(values[input_to_check], self._stepsize, lambda: run()[0])
            workspace.ResetWorkspace()
        far = ~np.isclose(gradient, estimate, atol=self._threshold, rtol=self._threshold)
        for index in np.argwhere(far)[:10]:
            place = tuple(index)
            log.warning(
                "gradient of %s at %s: %s, estimated %s",
                op.type,
                place,
                gradient[place],
                estimate[place],
            )
        return not far.any(), gradient, estimate.astype(np.float32)

    def _assertInferTensorChecks(
        self, op: caffe2_pb2.OperatorDef, grad_ops: Iterable[caffe2_pb2.OperatorDef]
    ) -> None:
        """Raise AssertionError when inferred shapes or types differ from the blobs'."""
        net = caffe2_pb2.NetDef(op=[op, *grad_ops])
        given = {name: workspace.FetchBlob(name) for name in op.input}
        given.update(
            {
                f"{name}_grad": workspace.FetchBlob(f"{name}_grad")
                for name in op.output
                if workspace.HasBlob(f"{name}_grad")
            }
        )
        types = {name: workspace.data_type_of(value.dtype) for name, value in given.items()}
        shapes, found = workspace.InferShapesAndTypes(
            [net], {n: v.shape for n, v in given.items()}, blob_types=types
        )
        for name in {name for each in net.op for name in each.output} & set(shapes):
            value = workspace.FetchBlob(name)
            assert list(value.shape) == list(shapes[name]), (
                f"{name}: inferred {shapes[name]}, is {value.shape}"
            )
            assert found[name] == workspace.data_type_of(value.dtype), (
                f"{name}: inferred type {found[name]}"
            )


class NetGradientChecker:
    """Checks of whole nets."""

    @staticmethod
    def CompareNets(
        nets: Sequence[core.Net],
        outputs: Sequence[Sequence[Any]],
        outputs_with_grad_ids: Sequence[int],
        inputs_with_grads: Sequence[Any],
        input_values: Mapping[Any, Any] | None = None,
        threshold: float = 1e-7,
        print_net_images: bool = False,
    ) -> tuple[list[list[Any]], list[list[Any]]]:
        """Compare outputs and gradients of nets that should compute the same.

        Returns:
            the outputs and the gradients of each net.

        Raises:
            AssertionError: they differ by more than the threshold.
        """
        results, gradients = [], []
        for net, of_net in zip(nets, outputs, strict=True):
            made, grads = _run_with_gradients(
                net, of_net, outputs_with_grad_ids, inputs_with_grads, input_values or {}
            )
            results.append(made)
            gradients.append(grads)
        for several in (results, gradients):
            for other in several[1:]:
                for a, b in zip(several[0], other, strict=True):
                    np.testing.assert_allclose(a, b, atol=threshold, rtol=threshold)
        return results, gradients

    @staticmethod
    def Check(
        net: core.Net,
        outputs_with_grad: Sequence[Any],
        input_values: Mapping[Any, Any],
        input_to_check: Any,
        step_size: float = 0.0001,
        threshold: float = 0.05,
        print_net: bool = True,
    ) -> None:
        """Check the gradient of one input of a net, where the loss is the sum of some outputs.

        Raises:
            AssertionError: gradient and estimate differ by more than the threshold.
        """
        checked = net.Clone(f"{net.Name()}_checked")
        gradients = checked.AddGradientOperators(list(outputs_with_grad))
        name = _get_grad_blob(gradients, input_to_check)
        values = {str(key): np.array(value) for key, value in input_values.items()}
        workspace.RunNetOnce(_fed(checked, values))
        if isinstance(name, tuple):
            indices, parts = map(workspace.FetchBlob, name)
            gradient = np.zeros_like(values[str(input_to_check)])
            np.add.at(gradient, indices, parts)
        else:
            gradient = workspace.FetchBlob(name)

        def loss() -> float:
            workspace.RunNetOnce(_fed(net, values))
            return sum(
                float(workspace.FetchBlob(output).astype(np.float64).sum())
                for output in outputs_with_grad
            )

        estimate = _estimated(values[str(input_to_check)], step_size, loss)
        np.testing.assert_allclose(
            gradient, estimate.reshape(gradient.shape), rtol=threshold, atol=threshold
        )


def _fed(net: core.Net, values: Mapping[str, Any]) -> core.Net:
    for name, value in values.items():
        workspace.FeedBlob(name, value)
    return net


def _run_with_gradients(
    net: core.Net,
    outputs: Sequence[Any],
    outputs_with_grad_ids: Sequence[int],
    inputs_with_grads: Sequence[Any],
    input_values: Mapping[Any, Any],
) -> tuple[list[Any], list[Any]]:
    gradients = net.AddGradientOperators([outputs[index] for index in outputs_with_grad_ids])
    workspace.RunNetOnce(_fed(net, {str(name): value for name, value in input_values.items()}))
    made = []
    for blob in inputs_with_grads:
        gradient = _get_grad_blob(gradients, blob)
        made += [
            workspace.FetchBlob(part)
            for part in (gradient if isinstance(gradient, tuple) else [gradient])
        ]
    return [workspace.FetchBlob(blob) for blob in outputs], made
