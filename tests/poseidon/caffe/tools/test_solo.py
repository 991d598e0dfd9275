"""One net in one process: models in order, and misfits that name their model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, open_net
from poseidon.errors import SnapshotError

NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 1 bias_term: false } }
layer { name: "b" type: "InnerProduct" bottom: "x" top: "b" inner_product_param { num_output: 1 bias_term: false } }
layer { name: "deep" type: "ReLU" bottom: "a" top: "deep" include { phase: TEST min_level: 2 stage: "s" } }
"""


@pytest.fixture
def net_file(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET, encoding="utf-8")
    return tmp_path / "net.prototxt"


def model(path: Path, **layers: float) -> Path:
    """A model whose layers are filled with one number each."""
    net = NetParameter()
    blobs = [
        (name, "InnerProduct", [np.full((1, 2), value, np.float32)])
        for name, value in layers.items()
    ]
    for name in layers:
        net.layer.add(name=name, type="InnerProduct")
    if path.suffix == ".h5":
        hdf5.write_model(path, blobs, owned={f"{name}.0" for name in layers})
    else:
        write_model(path, net, blobs)
    return path


def test_later_models_go_over_earlier_ones(net_file: Path, tmp_path: Path) -> None:
    weights = (
        model(tmp_path / "1.caffemodel", a=1, b=1),
        model(tmp_path / "2.caffemodel.h5", b=2, other=3),
    )
    net = open_net(NetRequest(model=net_file, phase=TEST, weights=weights))
    values = {name: float(blobs[0][0, 0]) for name, _, blobs in net.layer_blobs() if blobs}
    assert values == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("state", "phase", "level", "stages", "there"),
    [
        ("", TEST, 2, ("s", "t"), True),
        ("", TEST, 1, ("s",), False),
        ("", TEST, 2, (), False),
        ("", TRAIN, 2, ("s",), False),
        ('state { stage: "s" }', TEST, 2, ("t",), True),
        ('state { phase: TRAIN stage: "s" level: 2 }', TEST, 0, (), False),
    ],
)
def test_phase_level_and_stages(
    net_file: Path, state: str, phase: int, level: int, stages: tuple[str, ...], there: bool
) -> None:
    """As by Caffe's Net: a file's stages hold, its phase and level do not."""
    net_file.write_text(state + NET, encoding="utf-8")
    net = open_net(NetRequest(model=net_file, phase=phase, level=level, stages=stages))
    assert ("deep" in net.blob_shapes) is there


def test_a_misfit_names_its_model(net_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "wide.caffemodel"
    net = NetParameter()
    net.layer.add(name="a", type="InnerProduct")
    write_model(path, net, [("a", "InnerProduct", [np.zeros((3, 2), np.float32)])])
    with pytest.raises(
        SnapshotError, match=r"wide\.caffemodel: layer 'a': blob 0 has shape 3x2 in the file"
    ):
        open_net(NetRequest(model=net_file, phase=TEST, weights=(path,)))
