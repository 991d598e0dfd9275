"""The devices of this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto import DEVICE_NUMBERS

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
