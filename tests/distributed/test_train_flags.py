"""Flags of `poseidon train` that choose the net and its first weights: the launcher reads them, and
the worker, which is a thread here, builds the net.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.blob import from_array
from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.snapshot.caffemodel import read_model
from poseidon.launcher.site import Site
from tests.support.thread_launcher import start_thread
from tests.support.training_processes import machinefile, poseidon_here

pytestmark = pytest.mark.timeout(150)

NET = """
layer { name: "data" type: "DummyData" top: "x" top: "t"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "low" type: "InnerProduct" bottom: "x" top: "h" inner_product_param { num_output: 5
  weight_filler { type: "constant" value: 1 } } include { stage: "small" } }
layer { name: "wide" type: "InnerProduct" bottom: "x" top: "h" inner_product_param { num_output: 9
  weight_filler { type: "constant" value: 1 } } include { not_stage: "small" } }
layer { name: "deep" type: "ReLU" bottom: "h" top: "h" include { min_level: 2 } }
layer { name: "more" type: "InnerProduct" bottom: "h" top: "h2" inner_product_param { num_output: 9
  weight_filler { type: "constant" value: 1 } } }
layer { name: "top" type: "InnerProduct" bottom: "h2" top: "y" inner_product_param { num_output: 2
  weight_filler { type: "constant" value: 0.5 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0 lr_policy: "fixed" max_iter: 1 random_seed: 1 snapshot_prefix: "end" '
LEVEL_AND_STAGE = ("--stage=other,small", "-level", "2")
CHOSEN = ["data", "low", "deep", "more", "top", "loss"]


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker of a job be a thread of this process."""
    monkeypatch.setattr(Site, "start", start_thread)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    (tmp_path / "solver.prototxt").write_text(SOLVER, encoding="utf-8")
    return tmp_path


def train(folder: Path, *flags: str) -> dict[str, list[np.ndarray]]:
    """The saved layers of a job at rate 0."""
    done = poseidon_here(folder, "train", "--solver=solver.prototxt", *flags)
    assert done.returncode == 0, done.stderr
    return dict(read_model(folder / "end_iter_1.caffemodel"))


def model(path: Path, value: float, *names: str) -> None:
    """A caffemodel of these layers, whose weights are all `value`."""
    sizes = {"wide": (9, 3), "more": (9, 9), "top": (2, 9)}
    net = NetParameter()
    for name in names:
        shape = sizes[name]
        layer = net.layer.add(name=name, type="InnerProduct")
        layer.blobs.extend(from_array(np.full(s, value, np.float32)) for s in (shape, shape[:1]))
    path.write_bytes(net.SerializeToString())


@pytest.mark.usefixtures("in_threads")
def test_level_and_stage_choose_layers(folder: Path) -> None:
    """What a job without them chooses, the test below sees."""
    assert list(train(folder, *LEVEL_AND_STAGE)) == CHOSEN


@pytest.mark.thorough
@pytest.mark.processes
def test_level_and_stage_reach_the_processes_of_two_clients(folder: Path) -> None:
    hosts = f"--hostfile={machinefile(folder, 2)}"
    assert list(train(folder, hosts, *LEVEL_AND_STAGE)) == CHOSEN


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), [3, 2, 2]), (("--weights=m3.caffemodel,m4.caffemodel,m5.caffemodel",), [3, 3, 5])],
)
def test_models_of_the_solver_or_of_the_flag_in_order(
    folder: Path, flags: tuple[str, ...], expected: list[float]
) -> None:
    """weights, repeated and with commas, or --weights; what comes later wins layer by layer."""
    model(folder / "m1.caffemodel", 1, "wide", "more", "top")
    model(folder / "m3.caffemodel", 3, "wide", "more", "top")
    model(folder / "m2.caffemodel", 2, "wide", "top")
    model(folder / "m4.caffemodel", 4, "top")
    model(folder / "m5.caffemodel", 5, "top")
    (folder / "solver.prototxt").write_text(
        SOLVER + 'weights: "m1.caffemodel,m3.caffemodel" weights: "m2.caffemodel"', encoding="utf-8"
    )
    blobs = train(folder, *flags)
    assert list(blobs) == ["data", "wide", "more", "top", "loss"]
    assert [float(blobs[name][0].max()) for name in ("more", "wide", "top")] == expected
    assert all(np.all(blobs[name][0] == blobs[name][0].max()) for name in ("more", "wide", "top"))
