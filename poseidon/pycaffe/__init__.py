"""`import poseidon.pycaffe as caffe`: Caffe's Python interface on this project's layers; see docs/pycaffe.md."""

from poseidon import __version__ as __version__
from poseidon.layers.blob import Blob
from poseidon.layers.python_layer import CaffeLayer as Layer
from poseidon.proto.caffe_pb2 import TEST, TRAIN
from poseidon.pycaffe.alias import install
from poseidon.pycaffe.mode import (
    has_nccl,
    init_log,
    layer_type_list,
    log,
    set_device,
    set_mode_cpu,
    set_mode_gpu,
    set_multiprocess,
    set_random_seed,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
from poseidon.pycaffe.net import Net

__all__ = [
    "TEST",
    "TRAIN",
    "Blob",
    "Layer",
    "Net",
    "has_nccl",
    "init_log",
    "install",
    "layer_type_list",
    "log",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]
