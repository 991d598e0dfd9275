"""One net in one process: models in order, and misfits that name their model."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.caffemodel import write_model
from poseidon.caffe.tools.solo import NetRequest, PictureScores, open_net
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


def test_a_layer_without_weights_is_named(
    net_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = (model(tmp_path / "1.caffemodel", a=1), model(tmp_path / "2.caffemodel", other=3))
    open_net(NetRequest(model=net_file, phase=TEST, weights=weights)).close()
    assert "there are no weights for b in" in caplog.text
    caplog.clear()
    open_net(NetRequest(model=net_file, phase=TEST)).close()
    assert not caplog.text


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
    with pytest.raises(SnapshotError, match=r"wide\.caffemodel: layer 'a'"):
        open_net(NetRequest(model=net_file, phase=TEST, weights=(path,)))


def flattened(folder: Path, channels: int) -> Net:
    """Return a net whose output is its input, with room for two pictures."""
    path = folder / "net.prototxt"
    path.write_text(
        'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: '
        f"{channels} dim: 4 dim: 6 }} }} }}\n"
        'layer { name: "out" type: "Flatten" bottom: "data" top: "out" }',
        encoding="utf-8",
    )
    return open_net(NetRequest(model=path, phase=TEST))


@pytest.mark.parametrize("rgb", [False, True])
def test_a_picture_in_color(tmp_path: Path, rgb: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    net = flattened(tmp_path, 3)
    scores = PictureScores(net, mean=(1.0, 2.0, 3.0), scale=0.5, size=(8, 10), rgb=rgb)
    found = scores.of(tmp_path / "a.png")
    expected = pixels[2:6, 2:8, :: -1 if rgb else 1].transpose(2, 0, 1).astype(np.float32)
    expected = (expected - np.array([1, 2, 3], np.float32).reshape(3, 1, 1)) * np.float32(0.5)
    np.testing.assert_array_equal(found, expected.ravel())


def test_a_picture_for_a_net_of_grey_ones(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    found = PictureScores(flattened(tmp_path, 1)).of(tmp_path / "a.png")
    np.testing.assert_array_equal(found, pixels.ravel().astype(np.float32))
