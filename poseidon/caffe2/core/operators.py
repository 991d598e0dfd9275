"""The making of operator definitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from poseidon.caffe2 import scope, workspace
from poseidon.caffe2.core.blobs import _RectifyInputOutput
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.utils import MakeArgument

_ENGINES = {"FC": ("PACKED",), "Unique": ("SparseHash",)}
"""Engines of operators on the CPU: other ways to the same values, of which there is one here."""


def IsOperator(op_type: str) -> bool:
    """Return whether there is an operator of a name; `<name>_ENGINE_<engine>` names one for an
    engine of Caffe2.
    """
    name, _, engine = op_type.partition("_ENGINE_")
    return registry.is_registered(name) and engine in ("", *_ENGINES.get(name, ()))


def IsOperatorWithEngine(op_type: str, engine: str) -> bool:
    """Return whether there is an operator of a name for an engine: `DEFAULT`, or `CUDNN`, which
    is the same one.
    """
    return registry.is_registered(op_type) and engine in ("", "DEFAULT", "CUDNN")


def RefreshRegisteredOperators(trigger_lazy: bool = True) -> None:
    """Do nothing: the list of operators is always the present one."""


def CreateOperator(
    operator_type: str,
    inputs: Any,
    outputs: Any,
    name: str = "",
    control_input: Any = None,
    device_option: caffe2_pb2.DeviceOption | None = None,
    arg: Iterable[caffe2_pb2.Argument] | None = None,
    engine: str | None = None,
    debug_info: str | None = None,
    **kwargs: Any,
) -> caffe2_pb2.OperatorDef:
    """Return an operator's definition; its type may be one that does not exist.

    Args:
        operator_type: the type.
        inputs, outputs: blobs as names (the current scope is put before them) or references, one or
            several.
        name: of the operator.
        control_input: blobs that must be made before it runs.
        device_option: where it runs; by default the current device scope.
        arg: ready arguments.
        engine, debug_info: fields of the definition.
        kwargs: further arguments, those that are None left out; `random_seed` goes to the device
            option.

    Raises:
        TypeError: a blob is neither name nor reference.
        ValueError: an argument cannot hold its value.
    """
    operator = caffe2_pb2.OperatorDef(type=operator_type, name=name)
    operator.input.extend(str(blob) for blob in _RectifyInputOutput(inputs))
    operator.output.extend(str(blob) for blob in _RectifyInputOutput(outputs))
    if control_input:
        operator.control_input.extend(str(blob) for blob in _RectifyInputOutput(control_input))
    device = device_option if device_option is not None else scope.CurrentDeviceScope()
    if device is not None:
        operator.device_option.CopyFrom(device)
    if engine is not None:
        operator.engine = engine
    if debug_info is not None:
        operator.debug_info = debug_info
    if "random_seed" in kwargs:
        operator.device_option.random_seed = kwargs.pop("random_seed")
    if arg is not None:
        operator.arg.extend(arg)
    for key, value in kwargs.items():
        if value is not None:
            operator.arg.add().CopyFrom(MakeArgument(key, value))
    if workspace.IsImmediate():
        workspace.RunOperatorImmediate(operator)
    return operator
