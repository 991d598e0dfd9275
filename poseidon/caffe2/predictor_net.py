"""The part of a training net that computes given outputs from given inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from poseidon.caffe2 import core
from poseidon.caffe2.core.gradient_sums import rename
from poseidon.caffe2.proto import caffe2_pb2


def ExtractPredictorNet(
    net_proto: Any,
    input_blobs: Iterable[Any],
    output_blobs: Iterable[Any],
    device: Any = None,
    renames: Mapping[str, str] | None = None,
    disabled_inputs: Iterable[str] | None = None,
) -> tuple[Any, list[Any]]:
    """Return the net that computes outputs from inputs, and the parameters that it reads.

    Args:
        net_proto: the NetDef of the training net.
        input_blobs: the blobs that are fed.
        output_blobs: the blobs that are wanted.
        device: the device of all operators, in place of their own.
        renames: new names of blobs.
        disabled_inputs: inputs of operators that are taken away.

    Raises:
        Exception: an operator still trains (`is_test` is 0).
    """
    names = dict(renames or {})
    inputs = {str(blob) for blob in input_blobs}
    outputs = {str(blob) for blob in output_blobs}
    disabled = {str(blob) for blob in disabled_inputs or ()}
    net = core.Net(net_proto.name + "_predict" if net_proto.name else "predict")
    proto = net.Proto()
    forward = _forward(net_proto, inputs)
    ssa, versions = core.get_ssa(_net_of(forward))
    fed = [name for name in sorted(inputs) if name in versions]
    keep = core.get_op_ids_in_path(ssa, versions, fed, sorted(outputs))
    made: set[str] = set()
    parameters: list[str] = []
    for index in keep:
        op = copy.deepcopy(forward[index])
        _check_test_mode(op)
        left = [name for name in op.input if name not in disabled]
        op.input[:] = left
        for name in left:
            if name not in made and name not in inputs and name not in parameters:
                parameters.append(name)
        made.update(op.output)
        if device is not None:
            op.device_option.CopyFrom(device)
        _place_steps(op, device)
        rename(op.input, names)
        rename(op.output, names)
        proto.op.extend([op])
    proto.external_input.extend(names.get(name, name) for name in [*sorted(inputs), *parameters])
    proto.external_output.extend(names.get(name, name) for name in sorted(outputs))
    net._InvalidateLookupTables()
    return net, [names.get(name, name) for name in parameters]


def _place_steps(op: Any, device: Any) -> None:
    """Set the device of the step net of a recurrent operator, and drop the gradient of its
    steps.
    """
    for argument in op.arg if op.type.startswith("RecurrentNetwork") else ():
        if argument.name == "backward_step_net":
            argument.ClearField("n")
        elif argument.name == "step_net" and device is not None:
            for inner in argument.n.op:
                inner.device_option.CopyFrom(device)


def _forward(net_proto: Any, inputs: set[str]) -> list[Any]:
    """Return the operators that are not gradients and do not make an input."""
    return [
        op for op in net_proto.op if not op.is_gradient_op and not inputs.intersection(op.output)
    ]


def _net_of(operators: list[Any]) -> Any:
    net = caffe2_pb2.NetDef()
    net.op.extend(operators)
    return net


def _check_test_mode(op: Any) -> None:
    for argument in op.arg:
        if argument.name == "is_test" and argument.i == 0:
            raise Exception(
                "An operator had is_test=0, did you try to extract a predictor from a train model "
                f"(instead of test model)? Op was: {op}"
            )
