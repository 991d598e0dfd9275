"""Data parallelism: a model built once for each device, on one host or several.

data_parallel_model.Parallelize_GPU(
    model,
    input_builder_fun=add_input,
    forward_pass_builder_fun=add_layers,  # returns the losses
    optimizer_builder_fun=lambda model: optimizer.build_sgd(model, 0.1, momentum=0.9),
    devices=[0, 1],
)
data_parallel_model.RunInitNet(model)
data_parallel_model.RunNet(model, 100)
"""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.data_parallel_model.bmuf import Parallelize_BMUF
from poseidon.caffe2.data_parallel_model.collectives import TIMEOUT_S as _DEFAULT_TIMEOUT_SEC
from poseidon.caffe2.data_parallel_model.collectives import (
    AddBlobSync,
    AddDistributedBlobSync,
    CollectivesConcurrencyControl,
)
from poseidon.caffe2.data_parallel_model.parallelize import Parallelize
from poseidon.caffe2.data_parallel_model.replicas import ConvertNetForDevice, stripBlobName
from poseidon.caffe2.data_parallel_model.replicas import infer_devices as _InferBlobDevice
from poseidon.caffe2.data_parallel_model.running import (
    BARRIER_TIMEOUT_S as _DEFAULT_BARRIER_NET_TIMEOUT_SEC,
)
from poseidon.caffe2.data_parallel_model.running import (
    BatchSizesBySpeed,
    CreateNet,
    ExchangeValue,
    ExtractPredictorNet,
    FinalizeAfterCheckpoint,
    GetCheckpointParams,
    GetLearningRateBlobNames,
    RunInitNet,
    RunNet,
    RunWarmup,
    Synchronize,
)
from poseidon.caffe2.data_parallel_model.running import run_comparison as _RunComparison
from poseidon.caffe2.data_parallel_model.sharing import OptimizeGradientMemory

__all__ = [
    "_DEFAULT_BARRIER_NET_TIMEOUT_SEC",
    "_DEFAULT_TIMEOUT_SEC",
    "AddBlobSync",
    "AddDistributedBlobSync",
    "BatchSizesBySpeed",
    "CollectivesConcurrencyControl",
    "ConvertNetForDevice",
    "CreateNet",
    "ExchangeValue",
    "ExtractPredictorNet",
    "FinalizeAfterCheckpoint",
    "GetCheckpointParams",
    "GetLearningRateBlobNames",
    "OptimizeGradientMemory",
    "Parallelize",
    "Parallelize_BMUF",
    "Parallelize_CPU",
    "Parallelize_CPU_BMUF",
    "Parallelize_GPU",
    "Parallelize_GPU_BMUF",
    "Parallelize_iDeep",
    "RunInitNet",
    "RunNet",
    "RunWarmup",
    "Synchronize",
    "_InferBlobDevice",
    "_RunComparison",
    "stripBlobName",
]


def Parallelize_GPU(*args: Any, **kwargs: Any) -> None:
    """Call `Parallelize` for GPUs; on a machine without one the replicas run on the CPU."""
    kwargs["cpu_device"] = False
    Parallelize(*args, **kwargs)


def Parallelize_CPU(*args: Any, **kwargs: Any) -> None:
    """Call `Parallelize` for replicas on the CPU."""
    kwargs["cpu_device"] = True
    Parallelize(*args, **kwargs)


def Parallelize_iDeep(*args: Any, **kwargs: Any) -> None:
    """Call `Parallelize` for replicas on the CPU whose blobs have the scopes `ideep_<device>/`."""
    kwargs["ideep"] = True
    Parallelize(*args, **kwargs)


def Parallelize_GPU_BMUF(*args: Any, **kwargs: Any) -> None:
    """Call `Parallelize_BMUF` for GPUs; on a machine without one the replicas run on the CPU."""
    kwargs["cpu_device"] = False
    Parallelize_BMUF(*args, **kwargs)


def Parallelize_CPU_BMUF(*args: Any, **kwargs: Any) -> None:
    """Call `Parallelize_BMUF` for replicas on the CPU."""
    kwargs["cpu_device"] = True
    Parallelize_BMUF(*args, **kwargs)
