"""The public list is sorted and says what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

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


def test_lists_have_the_types_that_scripts_compare(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 3 } } }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 4 } }\n'
        'layer { name: "own" type: "Python" bottom: "y" top: "z" loss_weight: 1\n'
        f'  python_param {{ module: "{__name__}" layer: "Recording" }} }}\n'
    )
    path = tmp_path / "solver.prototxt"
    path.write_text(f'net: "{tmp_path}/net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1')
    solver = caffe.SGDSolver(path)
    net, own, seen = solver.net, caffe._caffe, Recording.seen
    solver.step(1)
    assert isinstance(solver, own.Solver) and caffe.pycaffe.SGDSolver is caffe.SGDSolver
    found = {
        own.BlobVec: (net.params["ip"], net.layers[1].blobs, net.layers[2].blobs, net._blobs),
        own.RawBlobVec: (seen["setup"], seen["reshape"], seen["forward"], seen["backward"]),
        own.BoolVec: (seen["propagate_down"],),
        own.LayerVec: (net.layers,),
        own.StringVec: (net._layer_names, net._blob_names),
        own.IntVec: (net._inputs, net._outputs, net._bottom_ids(1), net._top_ids(1)),
        own.DtypeVec: (net._blob_loss_weights,),
        own.NetVec: (solver.test_nets,),
        own.LayerParameter: (seen["param"],),
        own.SolverParameter: (solver.param,),
    }
    for kind, values in found.items():
        assert {type(value) for value in values} == {kind}


class Recording(caffe.Layer):
    """A layer in Python that keeps what it is called with."""

    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, param: Any) -> None:
        super().__init__(param)
        self.seen["param"] = param

    def setup(self, bottom: Any, top: Any) -> None:
        self.seen["setup"] = bottom

    def reshape(self, bottom: Any, top: Any) -> None:
        self.seen["reshape"] = top
        top[0].reshape(1)

    def forward(self, bottom: Any, top: Any) -> None:
        self.seen["forward"] = bottom

    def backward(self, top: Any, propagate_down: Any, bottom: Any) -> None:
        self.seen["backward"], self.seen["propagate_down"] = top, propagate_down
