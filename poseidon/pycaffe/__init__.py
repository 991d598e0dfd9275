"""`import poseidon.pycaffe as caffe`: Caffe's Python interface on this project's layers; see
docs/pycaffe.md.
"""

from poseidon.caffe.layers.blob import Blob
from poseidon.caffe.layers.python_layer import CaffeLayer as Layer
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN
from poseidon.pycaffe import _caffe, coord_map, draw, io, net_spec, proto, pycaffe
from poseidon.pycaffe.classifier import Classifier, Detector
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
    set_virtual_workers,
    solver_count,
    solver_rank,
)
from poseidon.pycaffe.net import Net
from poseidon.pycaffe.net_spec import NetSpec, layers, params, to_proto
from poseidon.pycaffe.parallel import NCCL, Gloo, Timer
from poseidon.pycaffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    get_solver,
)
from ps_server.numerics import prepare_process as _prepare_process

__version__ = "1.0.0"
"""The version of the Caffe whose interface this is, because scripts compare it."""

_prepare_process()  # before any thread that computes is started, because threads inherit the mode

__all__ = [
    "NCCL",
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Classifier",
    "Detector",
    "Gloo",
    "Layer",
    "NesterovSolver",
    "Net",
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "Timer",
    "_caffe",
    "coord_map",
    "draw",
    "get_solver",
    "has_nccl",
    "init_log",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "net_spec",
    "params",
    "proto",
    "pycaffe",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "set_virtual_workers",
    "solver_count",
    "solver_rank",
    "to_proto",
]
