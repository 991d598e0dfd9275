"""`caffe.pycaffe`: the names of pycaffe's module of this name, for scripts that import them from
there.
"""

from poseidon.pycaffe import io
from poseidon.pycaffe.net import Net
from poseidon.pycaffe.parallel import NCCL, Timer
from poseidon.pycaffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
)
