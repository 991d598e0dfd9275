"""Workspaces: feeding and fetching blobs, creating and running nets and plans."""

from __future__ import annotations

from poseidon.caffe2 import torch_ops
from poseidon.caffe2.workspace import c as C
from poseidon.caffe2.workspace import immediate
from poseidon.caffe2.workspace.cost import (
    ApplyTransform,
    ApplyTransformIfFaster,
    BenchmarkNet,
    GetOperatorCost,
)
from poseidon.caffe2.workspace.current import (
    CurrentWorkspace,
    GlobalInit,
    ResetWorkspace,
    RootFolder,
    SwitchWorkspace,
    WorkspaceGuard,
    Workspaces,
)
from poseidon.caffe2.workspace.devices import (
    GetCudaPeerAccessPattern,
    GetCUDAVersion,
    GetCuDNNVersion,
    GetDeviceProperties,
    GetGPUMemoryInfo,
    GetGpuPeerAccessPattern,
    GpuDeviceType,
    IsNUMAEnabled,
    NumCudaDevices,
    NumGpuDevices,
    has_cuda_support,
    has_gpu_support,
    has_hip_support,
)
from poseidon.caffe2.workspace.feeding import (
    Blobs,
    CreateBlob,
    DeserializeBlob,
    FeedBlob,
    FetchBlob,
    FetchBlobs,
    FetchTorch,
    GetBlobSizeBytes,
    GetNameScope,
    HasBlob,
    RemoveBlob,
    ResetBlob,
    SerializeBlob,
    blobs,
)
from poseidon.caffe2.workspace.filling import FillRandomNetworkInputs
from poseidon.caffe2.workspace.immediate import (
    FeedImmediate,
    FetchImmediate,
    ImmediateBlobs,
    IsImmediate,
    RunOperatorImmediate,
    StartImmediate,
    StopImmediate,
)
from poseidon.caffe2.workspace.inference import InferShapesAndTypes, data_type_of
from poseidon.caffe2.workspace.nets import (
    BackgroundPlan,
    CallWithExceptionIntercept,
    CreateNet,
    DeleteNet,
    GetNetName,
    RegisteredOperators,
    RunNet,
    RunNetOnce,
    RunOperatorOnce,
    RunOperatorsOnce,
    RunPlan,
    RunPlanInBackground,
    StringifyBlobName,
    StringifyNetName,
    StringifyProto,
    operator_tracebacks,
)
from poseidon.caffe2.workspace.predictor import Predictor

has_fbgemm = False
is_asan = False

assert torch_ops  # the import makes the functions of `torch.ops._caffe2`


def __getattr__(name: str) -> str:
    if name == "_immediate_root_folder":
        return immediate._Mode.folder
    raise AttributeError(f"module {__name__} has no attribute {name}")


__all__ = [
    "ApplyTransform",
    "ApplyTransformIfFaster",
    "BackgroundPlan",
    "BenchmarkNet",
    "Blobs",
    "C",
    "CallWithExceptionIntercept",
    "CreateBlob",
    "CreateNet",
    "CurrentWorkspace",
    "DeleteNet",
    "DeserializeBlob",
    "FeedBlob",
    "FeedImmediate",
    "FetchBlob",
    "FetchBlobs",
    "FetchImmediate",
    "FetchTorch",
    "FillRandomNetworkInputs",
    "GetBlobSizeBytes",
    "GetCUDAVersion",
    "GetCuDNNVersion",
    "GetCudaPeerAccessPattern",
    "GetDeviceProperties",
    "GetGPUMemoryInfo",
    "GetGpuPeerAccessPattern",
    "GetNameScope",
    "GetNetName",
    "GetOperatorCost",
    "GlobalInit",
    "GpuDeviceType",
    "HasBlob",
    "ImmediateBlobs",
    "InferShapesAndTypes",
    "IsImmediate",
    "IsNUMAEnabled",
    "NumCudaDevices",
    "NumGpuDevices",
    "Predictor",
    "RegisteredOperators",
    "RemoveBlob",
    "ResetBlob",
    "ResetWorkspace",
    "RootFolder",
    "RunNet",
    "RunNetOnce",
    "RunOperatorImmediate",
    "RunOperatorOnce",
    "RunOperatorsOnce",
    "RunPlan",
    "RunPlanInBackground",
    "SerializeBlob",
    "StartImmediate",
    "StopImmediate",
    "StringifyBlobName",
    "StringifyNetName",
    "StringifyProto",
    "SwitchWorkspace",
    "WorkspaceGuard",
    "Workspaces",
    "blobs",
    "data_type_of",
    "has_cuda_support",
    "has_fbgemm",
    "has_gpu_support",
    "has_hip_support",
    "is_asan",
    "operator_tracebacks",
]
