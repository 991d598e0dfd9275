"""The workspaces of the process, and which one is the current."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto import DEVICE_NUMBERS
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.views import WorkspaceView
from poseidon.caffe2.runtime.workspace import Workspace

log = logging.getLogger("poseidon.caffe2.workspace")

DEFAULT = "default"
_workspaces: dict[str, Workspace] = {DEFAULT: Workspace()}
_current_name = DEFAULT
_unnamed: list[Workspace] = []  # the open guards of workspaces without a name


def current() -> Workspace:
    return _unnamed[-1] if _unnamed else _workspaces[_current_name]


def CurrentWorkspace() -> str:
    return _current_name


def Workspaces() -> list[str]:
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
def WorkspaceGuard(workspace_name: str | WorkspaceView) -> Iterator[WorkspaceView]:
    """Work in another workspace, given by its name or as an object; one of a new name is made."""
    before = CurrentWorkspace()
    if isinstance(workspace_name, WorkspaceView):
        _unnamed.append(workspace_name._workspace)
    else:
        SwitchWorkspace(workspace_name, True)
    try:
        yield WorkspaceView(current())
    finally:
        if isinstance(workspace_name, WorkspaceView):
            _unnamed.pop()
        else:
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
    """Take Caffe2's command line flags (`--caffe2_log_level=2`); unknown ones are ignored."""
    for argument in args[1:]:
        key, _, value = str(argument).partition("=")
        if key == "--caffe2_log_level" and value.lstrip("-").isdigit():
            log.setLevel(max(logging.DEBUG, 20 + 10 * int(value)))
    return True


GpuDeviceType = DEVICE_NUMBERS["HIP" if torch.version.hip else "CUDA"]
has_hip_support = bool(torch.version.hip) and torch.cuda.is_available()
has_cuda_support = torch.cuda.is_available() and not has_hip_support
has_gpu_support = has_cuda_support or has_hip_support


def NumCudaDevices() -> int:
    """Return the number of GPUs, 0 without GPU support."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def NumGpuDevices() -> int:
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
    return np.array([[i == j or can(i, j) for j in range(count)] for i in range(count)]).reshape(
        count, count
    )


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
