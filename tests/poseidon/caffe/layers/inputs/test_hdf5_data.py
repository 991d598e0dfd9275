"""HDF5Data and HDF5Output in nets."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, NetState
from poseidon.errors import DefinitionError
from tests.support.nets import definition, inputs, layer, noise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(10.0).reshape(5, 2)
        file["y"] = np.arange(5)
    (tmp_path / "list").write_text("rows.h5\n")
    return tmp_path


def net(folder: Path, tops: str, body: str, rest: str = "", **place: int) -> Net:
    text = layer(
        "HDF5Data", "", tops, f'hdf5_data_param {{ source: "{folder}/list" {body} }} {rest}'
    )
    context = LayerContext(phase=TRAIN, seed=1, **place)  # type: ignore[arg-type]
    return compile_net(definition(text), context, state=NetState(phase=TRAIN))


def test_tops_are_the_datasets_of_their_names(folder: Path) -> None:
    compiled = net(folder, "y x", "batch_size: 3")
    try:
        assert compiled.blob_shapes == {"y": (3,), "x": (3, 2)}
        compiled()
        tops = compiled()
        assert tops["y"].tolist() == [3, 4, 0] and tops["x"].tolist() == [[6, 7], [8, 9], [0, 1]]
        assert [reader.batches_done for _, reader in compiled.readers()] == [2]
    finally:
        compiled.close()


def test_workers_stride(folder: Path) -> None:
    compiled = net(folder, "y", "batch_size: 2 shared_file_system: true", rank=1, workers=2)
    try:
        assert compiled()["y"].tolist() == [1, 3]
    finally:
        compiled.close()


@pytest.mark.parametrize(
    ("tops", "body", "rest", "message"),
    [
        ("x", "", "", "missing batch_size"),
        ("z", "batch_size: 1", "", "has no dataset 'z'"),
        ("x", "batch_size: 1", "transform_param { }", "does not transform"),
    ],
)
def test_mistakes(folder: Path, tops: str, body: str, rest: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        net(folder, tops, body, rest)


def output(path: str, **place: int) -> Net:
    text = inputs(x=(2, 3), y=(2,)) + layer(
        "HDF5Output", "x y", "", f'hdf5_output_param {{ file_name: "{path}" }}'
    )
    context = LayerContext(phase=TRAIN, seed=1, **place)  # type: ignore[arg-type]
    return compile_net(definition(text), context, state=NetState(phase=TRAIN))


def test_every_pass_adds_its_rows(tmp_path: Path) -> None:
    x, y = noise(4, 3), torch.arange(4.0)
    compiled = output(f"{tmp_path}/out.h5")
    for start in (0, 2):
        compiled({"x": x[start : start + 2], "y": y[start : start + 2]})
    compiled.close()
    with h5py.File(tmp_path / "out.h5") as file:
        np.testing.assert_array_equal(file["data"], x.numpy())
        np.testing.assert_array_equal(file["label"], y.numpy())


def test_each_worker_writes_a_file_of_its_own(tmp_path: Path) -> None:
    compiled = output(f"{tmp_path}/out.h5", rank=1, workers=2)
    compiled({"x": noise(2, 3), "y": torch.zeros(2)})
    compiled.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.h5_1"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="missing file_name"):
        output("")
    with pytest.raises(DefinitionError, match="there is no folder"):
        output(f"{tmp_path}/no/such/out.h5")


def test_a_shuffle_reaches_the_reader(folder: Path) -> None:
    compiled = net(folder, "y", "batch_size: 5 shuffle: true")
    try:
        passes = [compiled()["y"].tolist() for _ in range(4)]
    finally:
        compiled.close()
    assert all(sorted(found) == [0, 1, 2, 3, 4] for found in passes)
    assert len({tuple(found) for found in passes}) > 1
