"""The public list is sorted and says what is there."""

from __future__ import annotations

import poseidon.pycaffe as caffe

# What BVLC's `caffe/__init__.py` offers, in the parts of this package that it has always had.
OF_CAFFE = {
    "AdaDeltaSolver", "AdaGradSolver", "AdamSolver", "Classifier", "Detector", "Layer", "NCCL", "NesterovSolver", "Net",
    "RMSPropSolver", "SGDSolver", "TEST", "TRAIN", "Timer", "get_solver", "has_nccl", "init_log", "io", "layer_type_list", "log",
    "set_device", "set_mode_cpu", "set_mode_gpu", "set_multiprocess", "set_random_seed", "set_solver_count",
    "set_solver_rank", "solver_count", "solver_rank", "NetSpec", "layers", "params", "to_proto",
}  # fmt: skip


def test_the_list_is_what_is_there() -> None:
    assert len(caffe.__all__) == len(set(caffe.__all__))
    assert all(hasattr(caffe, name) for name in caffe.__all__)
    assert set(caffe.__all__) >= OF_CAFFE
    assert caffe.__version__ == "1.0.0"
