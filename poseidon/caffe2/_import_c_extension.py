"""The compiled part of Caffe2, under the name that scripts import: `workspace.C`, and its flags."""

from __future__ import annotations

from poseidon.caffe2.workspace import current
from poseidon.caffe2.workspace.c import (
    Mode,
    Workspace,
    create_db,
    get_stats,
    has_fbgemm,
    is_numa_enabled,
    nearby_opnames,
    registered_dbs,
    registered_operators,
    use_mkldnn,
)

has_cuda_support = current.has_cuda_support
has_hip_support = current.has_hip_support
has_gpu_support = current.has_gpu_support
num_cuda_devices = current.NumCudaDevices()
cuda_version = current.GetCUDAVersion()

__all__ = [
    "Mode",
    "Workspace",
    "create_db",
    "cuda_version",
    "get_stats",
    "has_cuda_support",
    "has_fbgemm",
    "has_gpu_support",
    "has_hip_support",
    "is_numa_enabled",
    "nearby_opnames",
    "num_cuda_devices",
    "registered_dbs",
    "registered_operators",
    "use_mkldnn",
]
