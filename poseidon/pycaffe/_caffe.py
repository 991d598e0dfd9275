"""`caffe._caffe`: the names of Caffe's compiled module, for scripts that import them from there."""

from poseidon.caffe.layers.blob import Blob, BlobVec, BoolVec, RawBlobVec
from poseidon.caffe.layers.python_layer import CaffeLayer as Layer
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, SolverParameter
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
from poseidon.pycaffe.net_base import DtypeVec, IntVec, LayerVec, NetVec, StringVec
from poseidon.pycaffe.parallel import NCCL, Timer
from poseidon.pycaffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    Solver,
    get_solver,
)
