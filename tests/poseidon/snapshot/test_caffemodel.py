"""Models: what is written is read back, what Caffe wrote is read, what is broken is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poseidon.errors import SnapshotError
from poseidon.proto.caffe_pb2 import NetParameter
from poseidon.snapshot.caffemodel import read_model, write_model


def net() -> NetParameter:
    message = NetParameter(name="n")
    message.layer.add(name="data", type="Input")
    message.layer.add(name="ip", type="InnerProduct", bottom=["data"], top=["ip"])
    return message


BLOBS = [
    ("data", "Input", []),
    ("ip", "InnerProduct", [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, dtype=np.float32)]),
]


def test_round_trip_keeps_definition_and_blobs(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel"
    write_model(path, net(), BLOBS)
    saved = dict(read_model(path))
    assert saved["data"] == []
    assert np.array_equal(saved["ip"][0], BLOBS[1][2][0])
    message = NetParameter.FromString(path.read_bytes())
    assert message.layer[1].bottom == ["data"]
    assert list(message.layer[1].blobs[0].shape.dim) == [2, 3]


@pytest.mark.parametrize("case", ["sgd_momentum", "adam", "adadelta"])
def test_caffes_own_files_hold_the_last_step(shared: Path, case: str) -> None:
    saved = dict(read_model(shared / "golden" / "files" / f"{case}_iter_12.caffemodel"))
    steps = np.load(shared / "golden" / "solvers" / f"{case}.npz")
    for layer in ("ip1", "ip2"):
        for index in range(2):
            assert np.array_equal(saved[layer][index], steps[f"step11:{layer}:{index}"])


def test_the_grammar_of_2014_is_read(shared: Path) -> None:
    folder = shared / "data" / "models" / "cifar10_quick_everpeace_V1"
    saved = dict(read_model(folder / "cifar10_quick_iter_5000.caffemodel"))
    assert saved["conv1"][0].shape == (32, 3, 5, 5)
    assert saved["ip2"][1].size == 10


def test_every_truncation_is_refused_or_lacks_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.caffemodel"
    write_model(path, net(), BLOBS)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        try:
            assert dict(read_model(path)).get("ip") is None
        except SnapshotError as error:
            assert str(path) in str(error)


def test_a_blob_whose_sizes_disagree_is_named(tmp_path: Path) -> None:
    message = net()
    blob = message.layer[1].blobs.add()
    blob.shape.dim.extend([2, 3])
    blob.data.extend([1.0] * 5)
    path = tmp_path / "m.caffemodel"
    path.write_bytes(message.SerializeToString())
    with pytest.raises(SnapshotError, match="layer 'ip'"):
        read_model(path)
