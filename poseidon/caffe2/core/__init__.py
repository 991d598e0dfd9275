"""The builder API: scopes, devices, blobs, operators, nets, gradients, plans."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.caffe2 import workspace
from poseidon.caffe2.core import control_gradients
from poseidon.caffe2.core.blobs import (
    BlobReference,
    CreateOperator,
    CreatePythonOperator,
    DataType,
    DeviceOption,
    GradientSlice,
    IsGPUDeviceType,
    IsOperator,
    IsOperatorWithEngine,
    RefreshRegisteredOperators,
    ScopedBlobReference,
    ScopedName,
    _get_blob_ref,
    _RectifyInputOutput,
    _RegisterPythonImpl,
    device_option_equal,
    output_to_list,
)
from poseidon.caffe2.core.cloning import DEFAULT_REMAP_FUNCS, clone_and_bind_net
from poseidon.caffe2.core.device_copies import (
    InferBlobDevices,
    InferOpBlobDevices,
    InferOpBlobDevicesAsDict,
    InferOpDeviceAsBlobDevices,
    InjectCrossDeviceCopies,
    InjectDeviceCopiesAmongNets,
    InjectDeviceCopiesAmongNetsWithoutB2D,
    copy_func_between_devices,
    device_equal,
)
from poseidon.caffe2.core.gradient_sums import (
    get_op_ids_in_path,
    get_output_producers,
    get_ssa,
    get_undefined_blobs,
    recurrent_network_op_remap,
    remap_proto,
)
from poseidon.caffe2.core.gradients import IR, GetIndexFromGradientList, GradientRegistry, OpSSA
from poseidon.caffe2.core.net import Net
from poseidon.caffe2.core.plan import (
    ExecutionStep,
    Plan,
    add_nets_in_order,
    execution_step,
    get_net_name,
    scoped_execution_step,
    to_execution_step,
)
from poseidon.caffe2.scope import (
    CurrentDeviceScope,
    CurrentNameScope,
    DeviceScope,
    EmptyDeviceScope,
    EmptyNameScope,
    NameScope,
)

__all__ = [
    "DEFAULT_REMAP_FUNCS",
    "IR",
    "BlobReference",
    "C",
    "CreateOperator",
    "CreatePythonOperator",
    "CurrentDeviceScope",
    "CurrentNameScope",
    "DataType",
    "DeviceOption",
    "DeviceScope",
    "EmptyDeviceScope",
    "EmptyNameScope",
    "ExecutionStep",
    "GetGlobalInitArgs",
    "GetIndexFromGradientList",
    "GlobalInit",
    "GradientRegistry",
    "GradientSlice",
    "InferBlobDevices",
    "InferOpBlobDevices",
    "InferOpBlobDevicesAsDict",
    "InferOpDeviceAsBlobDevices",
    "InjectCrossDeviceCopies",
    "InjectDeviceCopiesAmongNets",
    "InjectDeviceCopiesAmongNetsWithoutB2D",
    "IsGPUDeviceType",
    "IsOperator",
    "IsOperatorWithEngine",
    "NameScope",
    "Net",
    "OpSSA",
    "Plan",
    "RefreshRegisteredOperators",
    "ScopedBlobReference",
    "ScopedName",
    "_RectifyInputOutput",
    "_RegisterPythonImpl",
    "_get_blob_ref",
    "add_nets_in_order",
    "clone_and_bind_net",
    "copy_func_between_devices",
    "device_equal",
    "device_option_equal",
    "execution_step",
    "get_net_name",
    "get_op_ids_in_path",
    "get_output_producers",
    "get_ssa",
    "get_undefined_blobs",
    "output_to_list",
    "recurrent_network_op_remap",
    "remap_proto",
    "scoped_execution_step",
    "to_execution_step",
]


C = workspace.C
"""The compiled part of Caffe2, which scripts name here too."""


def __getattr__(name: str) -> set[str]:
    if name == "_REGISTERED_OPERATORS":
        return set(workspace.RegisteredOperators())
    raise AttributeError(f"module {__name__} has no attribute {name}")


assert control_gradients  # the import registers the gradients of Do, If and While

_global_init_args: list[Sequence[str]] = []


def GlobalInit(args: Sequence[str]) -> None:
    """Take Caffe2's command line flags; see `workspace.GlobalInit`."""
    _global_init_args.append(list(args[1:]))
    workspace.GlobalInit(args)


def GetGlobalInitArgs() -> list[str]:
    """Return the flags of the last `GlobalInit`, without the program's name."""
    return list(_global_init_args[-1]) if _global_init_args else []
