"""The fully convolutional nets of prototxt/fcn: what is committed is what the script writes, and
it runs, narrowed.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import poseidon.pycaffe as caffe
from poseidon.caffe.proto.caffe_pb2 import NetParameter
from poseidon.caffe.proto.definition import read_net

CLASSES = 21
# Of the crops, the released models' own.
OFFSETS = {32: [19], 8: [5, 9, 31]}


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "prototxt" / "fcn"


def narrow(path: Path, target: Path) -> Path:
    """The net with 8 channels a convolution that gives no scores, and a small picture for its
    databases.
    """
    net = read_net(path).param
    for layer in net.layer:
        if layer.type == "Convolution" and layer.convolution_param.num_output != CLASSES:
            layer.convolution_param.num_output = 8
            layer.convolution_param.weight_filler.type = "msra"
    rest = [layer for layer in net.layer if layer.type not in ("Data", "Input")]
    source = NetParameter().layer.add(name="dummies", type="DummyData", top=["data", "label"])
    shapes = "shape { dim: 1 dim: 3 dim: 40 dim: 33 } shape { dim: 1 dim: 1 dim: 40 dim: 33 }"
    fillers = 'data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 3 }'
    text_format.Parse(f"{shapes} {fillers}", source.dummy_data_param)
    target.write_text(str(NetParameter(name=net.name, layer=[source, *rest])))
    return target


def test_the_committed_files_are_what_the_script_writes(folder: Path) -> None:
    written = runpy.run_path(str(folder / "generate.py"))["definitions"]()
    assert written == {path.name: path.read_text() for path in folder.glob("*.prototxt")}


@pytest.mark.parametrize("stride", OFFSETS)
def test_scores_are_cut_where_the_released_models_cut_them(folder: Path, stride: int) -> None:
    param = read_net(folder / f"fcn{stride}s_deploy.prototxt").param
    assert [layer.crop_param.offset[0] for layer in param.layer if layer.type == "Crop"] == OFFSETS[
        stride
    ]
    assert text_format.Parse(str(param), NetParameter()) == param


@pytest.mark.parametrize("stride", OFFSETS)
def test_a_step(folder: Path, tmp_path: Path, stride: int) -> None:
    path = narrow(folder / f"fcn{stride}s_train_val.prototxt", tmp_path / "net.prototxt")
    caffe.set_random_seed(1)
    net = caffe.Net(str(path), caffe.TRAIN)
    # Scores begin at 0, as the released definitions leave them; here they are to carry gradients.
    for name, blobs in net.params.items():
        if name.startswith("score"):
            blobs[0].data[...] = np.random.default_rng(0).standard_normal(blobs[0].data.shape)
    assert np.isfinite(net.forward()["loss"])
    assert net.blobs["score"].data.shape == (1, CLASSES, 40, 33)
    net.backward()
    learned = {name: blobs for name, blobs in net.params.items() if not name.startswith("upscore")}
    assert all(np.isfinite(blob.diff).all() for blobs in learned.values() for blob in blobs)
    assert [name for name, blobs in learned.items() if not blobs[1].diff.any()] == []
    net.save(str(tmp_path / "net.caffemodel"))
    again = caffe.Net(str(path), str(tmp_path / "net.caffemodel"), caffe.TRAIN)
    for name, blobs in net.params.items():
        for mine, read in zip(blobs, again.params[name], strict=True):
            np.testing.assert_array_equal(mine.data, read.data)
