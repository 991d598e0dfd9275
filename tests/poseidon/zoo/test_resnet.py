"""The residual nets of prototxt/resnet: what is committed is what the script writes, and it runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import poseidon.pycaffe as caffe
from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.proto.definition import read_net

# Learned parameters: all but the statistics of BatchNorm. ResNet-50's first convolution has a bias of 64, as released.
LEARNED = {18: 11_689_512, 50: 25_557_032 + 64, 101: 44_549_160, 152: 60_192_808}


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "prototxt" / "resnet"


def small(path: Path, target: Path) -> Path:
    """The net of `path` with one picture of 64x64 in place of its data layers."""
    net = text_format.Parse(path.read_text(), NetParameter())
    rest = [layer for layer in net.layer if layer.type not in ("Data", "Input")]
    del net.layer[:]
    shapes = "shape { dim: 1 dim: 3 dim: 64 dim: 64 } shape { dim: 1 }"
    fillers = 'data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" }'
    text_format.Parse(
        f'layer {{ name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {{ {shapes} {fillers} }} }}',
        net,
    )
    net.layer.extend(rest)
    target.write_text(str(net))
    return target


def test_the_committed_files_are_what_the_script_writes(folder: Path) -> None:
    written = runpy.run_path(str(folder / "generate.py"))["definitions"]()
    assert written == {path.name: path.read_text() for path in folder.glob("*.prototxt")}


@pytest.mark.parametrize("depth", LEARNED)
def test_learned_parameters_and_a_step(folder: Path, tmp_path: Path, depth: int) -> None:
    path = small(folder / f"resnet{depth}_train_val.prototxt", tmp_path / "net.prototxt")
    net = caffe.Net(str(path), caffe.TRAIN)
    kinds = {name: layer.type for name, layer in net.layer_dict.items()}
    learned = {name: blobs for name, blobs in net.params.items() if kinds[name] != "BatchNorm"}
    assert sum(blob.data.size for blobs in learned.values() for blob in blobs) == LEARNED[depth]
    assert np.isfinite(net.forward()["loss"])
    net.backward()
    assert np.abs(net.params["fc1000"][0].diff).max() > 0


def test_weights_return_the_same_scores(folder: Path, tmp_path: Path) -> None:
    path = small(folder / "resnet18_deploy.prototxt", tmp_path / "net.prototxt")
    first, second = caffe.Net(str(path), caffe.TEST), caffe.Net(str(path), caffe.TEST)
    for blob in first.params["bn_conv1"]:
        blob.data[...] = 1
    first.save(str(tmp_path / "net.caffemodel"))
    second.copy_from(str(tmp_path / "net.caffemodel"))
    first.forward()
    second.blobs["data"].data[...] = first.blobs["data"].data
    second.forward(start="conv1")
    for name, blobs in first.params.items():
        for mine, read in zip(blobs, second.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, read.data)
    np.testing.assert_array_equal(first.blobs["fc1000"].data, second.blobs["fc1000"].data)


@pytest.mark.parametrize("depth", LEARNED)
def test_definitions_survive_printing(folder: Path, depth: int) -> None:
    net = read_net(folder / f"resnet{depth}_train_val.prototxt").param
    assert text_format.Parse(str(net), NetParameter()) == net
