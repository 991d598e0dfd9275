"""Workspaces: feeding and fetching blobs, creating and running nets and plans."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import Message

from poseidon.caffe2 import operators, scope
from poseidon.caffe2.operators import registry
from poseidon.caffe2.proto import DEVICE_NUMBERS, caffe2_pb2
from poseidon.caffe2.runtime import shapes
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.blob import is_tensor
from poseidon.caffe2.runtime.data_types import NUMBER_OF, TORCH_OF
from poseidon.caffe2.runtime.errors import EnforceNotMet, place_of
from poseidon.caffe2.runtime.plan import run_plan
from poseidon.caffe2.runtime.values import from_proto, from_value, to_value
from poseidon.caffe2.runtime.workspace import Workspace

assert operators  # the import registers them

log = logging.getLogger(__name__)

GpuDeviceType = DEVICE_NUMBERS["HIP" if torch.version.hip else "CUDA"]
has_hip_support = bool(torch.version.hip) and torch.cuda.is_available()
has_cuda_support = torch.cuda.is_available() and not has_hip_support
has_gpu_support = has_cuda_support or has_hip_support
has_fbgemm = False
is_asan = False

DEFAULT = "default"
_workspaces: dict[str, Workspace] = {DEFAULT: Workspace()}
_current_name = DEFAULT
operator_tracebacks: defaultdict[str, dict[int, Any]] = defaultdict(dict)
"""Where each operator of a net was made, by the net's name and the operator's index."""


def current() -> Workspace:
    """Return the current workspace."""
    return _workspaces[_current_name]


# Workspaces.


def CurrentWorkspace() -> str:
    """Return the name of the current workspace."""
    return _current_name


def Workspaces() -> list[str]:
    """Return the names of all workspaces."""
    return list(_workspaces)


def SwitchWorkspace(name: str, create_if_missing: bool = False) -> None:
    """Make another workspace the current one.

    Raises:
        RuntimeError: there is none of this name.
    """
    global _current_name  # noqa: PLW0603 (a process has one current workspace)
    if name not in _workspaces:
        if not create_if_missing:
            raise EnforceNotMet(f"Workspace of the specified name does not exist: {name}")
        _workspaces[name] = Workspace()
    _current_name = name


@contextlib.contextmanager
def WorkspaceGuard(workspace_name: str) -> Iterator[None]:
    """Work in another workspace; it is made where there is none."""
    before = CurrentWorkspace()
    SwitchWorkspace(workspace_name, True)
    try:
        yield
    finally:
        SwitchWorkspace(before)


def ResetWorkspace(root_folder: str | None = None) -> bool:
    """Drop all blobs and nets of the current workspace.

    Args:
        root_folder: its folder from now on; by default ".".
    """
    if root_folder is not None and not os.path.exists(root_folder):
        os.makedirs(root_folder)
    current().reset(root_folder or ".")
    return True


def RootFolder() -> str:
    """Return the folder of the current workspace."""
    return current().root_folder


def GlobalInit(args: Sequence[str]) -> bool:
    """Take Caffe2's command line flags (`--caffe2_log_level=2`); what is not known here is ignored."""
    for argument in args[1:]:
        key, _, value = str(argument).partition("=")
        if key == "--caffe2_log_level" and value.lstrip("-").isdigit():
            log.setLevel(max(logging.DEBUG, 20 + 10 * int(value)))
    return True


# Devices.


def NumCudaDevices() -> int:
    """Return the number of GPUs, 0 without GPU support."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def NumGpuDevices() -> int:
    """Return the number of GPUs."""
    return NumCudaDevices()


def GetCUDAVersion() -> int:
    """Return CUDA's version as its own number, e.g. 12040; 0 without CUDA."""
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    return 1000 * int(major) + 10 * int(minor)


def GetCuDNNVersion() -> int:
    """Return cuDNN's version number, 0 without it."""
    return torch.backends.cudnn.version() or 0


def GetCudaPeerAccessPattern() -> np.ndarray:
    """Return which GPU can read the memory of which."""
    count = NumCudaDevices()
    can = torch.cuda.can_device_access_peer
    return np.array([[i == j or can(i, j) for j in range(count)] for i in range(count)]).reshape(count, count)


def GetGpuPeerAccessPattern() -> np.ndarray:
    """Return which GPU can read the memory of which."""
    return GetCudaPeerAccessPattern()


def GetDeviceProperties(deviceid: int) -> dict[str, Any]:
    """Return name and version of a GPU."""
    properties = torch.cuda.get_device_properties(deviceid)
    return {
        "name": properties.name,
        "major": properties.major,
        "minor": properties.minor,
        "totalGlobalMem": properties.total_memory,
    }


def GetGPUMemoryInfo(deviceid: int) -> tuple[int, int]:
    """Return free and total memory of a GPU in bytes."""
    return torch.cuda.mem_get_info(deviceid)


def IsNUMAEnabled() -> bool:
    """Return False: blobs are not bound to NUMA nodes."""
    return False


def RegisteredOperators() -> list[str]:
    """Return the names of all operators."""
    return registry.registered()


# Nets.


def GetNetName(net: Any) -> str:
    """Return the name of a net, given as a name, a net, a NetDef or its bytes."""
    return StringifyNetName(net)


def StringifyNetName(name: Any) -> str:
    """Return the name of a net, given as a name, a net or a NetDef."""
    if isinstance(name, (str, bytes)):
        return name.decode() if isinstance(name, bytes) else name
    return str(name.name if isinstance(name, caffe2_pb2.NetDef) else name.Proto().name)


def StringifyBlobName(name: Any) -> str:
    """Return the name of a blob, given as a name or a reference.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(name, (str, bytes)):
        return name.decode() if isinstance(name, bytes) else name
    if type(name).__name__ == "BlobReference":
        return str(name)
    raise ValueError(f"Expected a string or BlobReference, got {type(name).__name__}: {name!r}")


def StringifyProto(obj: Any) -> bytes:
    """Return the bytes of a message, given as bytes, a message, or an object with `Proto()`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(obj, (str, bytes)):
        return obj.encode() if isinstance(obj, str) else obj
    if isinstance(obj, Message):
        return obj.SerializeToString()
    if hasattr(obj, "Proto"):
        return bytes(obj.Proto().SerializeToString())
    raise ValueError(f"Unexpected argument to StringifyProto of type {type(obj).__name__}")


def _net_def(net: Any) -> caffe2_pb2.NetDef:
    if isinstance(net, caffe2_pb2.NetDef):
        return net
    if hasattr(net, "Proto"):
        proto = net.Proto()
        assert isinstance(proto, caffe2_pb2.NetDef)
        return proto
    return caffe2_pb2.NetDef.FromString(StringifyProto(net))


def CallWithExceptionIntercept(
    func: Callable[..., Any], op_id_fetcher: Any, net_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a function; where an operator fails, log where the script made it."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        net, index = place_of(error) or (net_name, -1)
        frames = operator_tracebacks.get(net or net_name, {}).get(index)
        if frames:
            lines = [f'  File "{path}", line {line}, in {function}' for path, line, function in frames]
            log.warning(
                "Original python traceback for operator %d in network %s:\n%s", index, net, "\n".join(lines)
            )
        raise


def CreateNet(net: Any, overwrite: bool = False, input_blobs: Iterable[Any] | None = None) -> bool:
    """Compile a net and keep it under its name.

    Args:
        net: a net, a NetDef or its bytes.
        overwrite: whether a net of the same name is replaced.
        input_blobs: blobs to create, empty, before.

    Raises:
        RuntimeError: there is a net of this name, or an operator cannot be made; the message names the operator.
    """
    for name in input_blobs or ():
        current().create(StringifyBlobName(name))
    definition = _net_def(net)
    CallWithExceptionIntercept(current().create_net, None, definition.name, definition, overwrite)
    return True


def RunNetOnce(net: Any) -> bool:
    """Compile a net, run it once and forget it; raises as `CreateNet` and `RunNet` do."""
    definition = _net_def(net)
    CallWithExceptionIntercept(current().run_once, None, definition.name, definition)
    return True


def RunNet(name: Any, num_iter: int = 1, allow_fail: bool = False) -> bool:
    """Run a net that was created.

    Args:
        name: the net or its name.
        num_iter: how often.
        allow_fail: whether a failure gives False instead of an error.

    Raises:
        RuntimeError: there is no such net, or an operator has failed; the message names the operator.
    """
    net = current().nets.get(StringifyNetName(name))
    if net is None:
        raise EnforceNotMet(f"Can't find net {StringifyNetName(name)}")
    try:
        for _ in range(num_iter):
            CallWithExceptionIntercept(net.run, None, net.name)
    except RuntimeError:
        if not allow_fail:
            raise
        return False
    return True


def DeleteNet(name: Any) -> None:
    """Forget a net."""
    current().nets.pop(StringifyNetName(name), None)


def RunOperatorOnce(operator: Any) -> bool:
    """Run one operator, given as an OperatorDef or its bytes."""
    if not isinstance(operator, caffe2_pb2.OperatorDef):
        operator = caffe2_pb2.OperatorDef.FromString(StringifyProto(operator))
    current().run_operator(operator)
    return True


def RunOperatorsOnce(operators: Iterable[Any]) -> bool:
    """Run operators in order."""
    return all(RunOperatorOnce(operator) for operator in operators)


def _plan_def(plan_or_step: Any) -> caffe2_pb2.PlanDef:
    if isinstance(plan_or_step, caffe2_pb2.PlanDef):
        return plan_or_step
    if hasattr(plan_or_step, "Substeps"):
        plan = caffe2_pb2.PlanDef(name=plan_or_step.Name())
        plan.execution_step.add().CopyFrom(plan_or_step.Proto())
        seen: dict[str, Any] = {}
        queue = [plan_or_step]
        for step in queue:
            queue.extend(step.Substeps())
            seen.update({net.Name(): net for net in step.Nets()})
        plan.network.extend(net.Proto() for net in seen.values())
        return plan
    return caffe2_pb2.PlanDef.FromString(StringifyProto(plan_or_step))


def RunPlan(plan_or_step: Any, policy: Any = None) -> bool:
    """Run a plan, or a step."""
    run_plan(_plan_def(plan_or_step), current())
    return True


class BackgroundPlan:
    """A plan that runs on a thread."""

    def __init__(self, plan: caffe2_pb2.PlanDef, workspace: Workspace) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(plan, workspace), daemon=True)
        self._thread.start()

    def _run(self, plan: caffe2_pb2.PlanDef, workspace: Workspace) -> None:
        try:
            run_plan(plan, workspace)
        except BaseException as error:  # noqa: BLE001 (the owner of the plan asks for it)
            self._error = error

    def is_done(self) -> bool:
        """Return whether the plan has ended."""
        return not self._thread.is_alive()

    def is_succeeded(self) -> bool:
        """Return whether the plan has ended without an error."""
        return self.is_done() and self._error is None


def RunPlanInBackground(plan_or_step: Any) -> BackgroundPlan:
    """Start a plan on a thread."""
    return BackgroundPlan(_plan_def(plan_or_step), current())


# Blobs.


def Blobs() -> list[str]:
    """Return the names of the blobs of the current workspace."""
    return sorted(current().blobs)


def HasBlob(name: Any) -> bool:
    """Return whether there is a blob."""
    return current().find(StringifyBlobName(name)) is not None


def CreateBlob(name: Any) -> None:
    """Make an empty blob where there is none."""
    current().create(StringifyBlobName(name))


def ResetBlob(name: Any) -> None:
    """Empty a blob.

    Raises:
        RuntimeError: there is none of this name.
    """
    current().get(StringifyBlobName(name)).value = None


def RemoveBlob(name: Any) -> None:
    """Remove a blob from the current workspace; nets that use it keep it."""
    current().blobs.pop(StringifyBlobName(name), None)


def FeedBlob(name: Any, arr: Any, device_option: caffe2_pb2.DeviceOption | None = None) -> bool:
    """Set a blob.

    Args:
        name: the blob; it is made where there is none.
        arr: a numpy array (it is copied), a torch tensor (it is shared on the same device), a TensorProto, a string.
        device_option: where the tensor lies; by default the current device scope.

    Raises:
        RuntimeError: a blob cannot hold the value.
    """
    option = device_option if device_option is not None else scope.CurrentDeviceScope()
    device = torch.device("cpu") if option is None else device_of(option)
    if isinstance(arr, caffe2_pb2.TensorProto):
        arr = from_proto(arr)
    if isinstance(arr, np.ndarray) and arr.dtype == np.float64 and device.type == "cuda":
        log.warning(
            "CUDA operators do not support 64-bit doubles, please use arr.astype(np.float32) or np.int32 for ints. "
            "Blob: %s type: %s",
            name,
            arr.dtype,
        )
    current().create(StringifyBlobName(name)).value = to_value(arr, device)
    return True


def FetchBlob(name: Any) -> Any:
    """Return a blob: an array of its own, the bytes of a string, or a sentence about any other object.

    Raises:
        RuntimeError: there is none of this name.
    """
    plain = StringifyBlobName(name)
    return from_value(plain, current().get(plain).value)


def FetchBlobs(names: Iterable[Any]) -> list[Any]:
    """Return several blobs."""
    return [FetchBlob(name) for name in names]


def FetchTorch(name: Any) -> torch.Tensor:
    """Return the tensor of a blob itself.

    Raises:
        RuntimeError: there is no such blob, or it holds no tensor of numbers.
    """
    value = current().get(StringifyBlobName(name)).value
    if not isinstance(value, torch.Tensor):
        raise EnforceNotMet(f"The blob {name} holds no tensor of numbers")
    return value


def GetBlobSizeBytes(name: Any) -> int:
    """Return the bytes of a tensor; a string counts 32 bytes and its length."""
    value = current().get(StringifyBlobName(name)).value
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if is_tensor(value):
        return sum(32 + len(text) for text in value.reshape(-1).tolist())
    return len(value) if isinstance(value, bytes) else 0


def GetNameScope() -> str:
    """Return the prefix of names."""
    return scope.CurrentNameScope()


class _BlobDict:
    """The blobs of the current workspace as a dictionary: `blobs["x"] = array`."""

    def __getitem__(self, key: Any) -> Any:
        return FetchBlob(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        FeedBlob(key, value)

    def __len__(self) -> int:
        return len(Blobs())

    def __iter__(self) -> Iterator[str]:
        return iter(Blobs())

    def __contains__(self, item: Any) -> bool:
        return HasBlob(item)

    def keys(self) -> list[str]:
        """Return the names."""
        return Blobs()


blobs = _BlobDict()


# Shapes.


def InferShapesAndTypes(
    nets: Iterable[Any],
    blob_dimensions: dict[Any, Sequence[int]] | None = None,
    nets_proto: bool = False,
    blob_types: dict[Any, int] | None = None,
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return shapes and data types of the blobs of nets, those that follow without running.

    Args:
        nets: in the order in which they run.
        blob_dimensions: shapes of the inputs; by default those of the blobs of the workspace.
        nets_proto: whether `nets` are NetDefs.
        blob_types: data types of these inputs; by default FLOAT.
    """
    known: dict[str, torch.Tensor] = {}
    if blob_dimensions is None:
        for name, blob in current().blobs.items():
            if isinstance(blob.value, torch.Tensor):
                known[name] = blob.value.to("meta")
    else:
        types = {str(name): TORCH_OF[number] for name, number in (blob_types or {}).items()}
        for key, dims in blob_dimensions.items():
            known[str(key)] = torch.empty(list(dims), dtype=types.get(str(key), torch.float32), device="meta")
    found = shapes.infer([_net_def(net) for net in nets], known)
    return (
        {name: list(value.shape) for name, value in found.items()},
        {name: int(NUMBER_OF[value.dtype]) for name, value in found.items()},
    )
