"""Data: shapes, labels, shares and errors, on databases written for the test."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.databases.writer import write_database
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.layers.base import LayerContext
from poseidon.caffe.net.compile import compile_net
from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TRAIN, Datum, NetState
from poseidon.errors import DataError, DefinitionError
from tests.support.databases import make_database
from tests.support.nets import definition, layer

RECORDS = 8


def write(path: Path, backend: Backend = Backend.LMDB, start: int = 0) -> None:
    """Record i is a 2 x 3 x 4 picture of value i with label i."""
    with write_database(path, backend) as writer:
        for index in range(start, start + RECORDS):
            record = encode_datum(np.full((2, 3, 4), index, np.uint8), index)
            writer.put(f"{index:08d}".encode(), record)


def net(
    folder: Path,
    body: str,
    *,
    tops: str = "data label",
    rest: str = "",
    above: str = "",
    **place: int,
) -> Net:
    text = (
        layer("Data", "", tops, f'data_param {{ source: "{folder / "db"}" {body} }} {rest}') + above
    )
    context = LayerContext(phase=TRAIN, seed=1, **place)  # type: ignore[arg-type]
    return compile_net(definition(text), context, state=NetState(phase=TRAIN))


@pytest.mark.parametrize("backend", list(Backend))
def test_batches_follow_the_database(tmp_path: Path, backend: Backend) -> None:
    write(tmp_path / "db", backend)
    compiled = net(
        tmp_path, f"batch_size: 3 backend: {backend.name}", rest="transform_param { scale: 0.5 }"
    )
    assert compiled.blob_shapes == {"data": (3, 2, 3, 4), "label": (3,)}
    try:
        labels = []
        for _ in range(3):
            tops = compiled()
            labels += tops["label"].tolist()
            assert torch.equal(
                tops["data"], (tops["label"] / 2).reshape(3, 1, 1, 1).expand(3, 2, 3, 4)
            )
        assert labels == [0, 1, 2, 3, 4, 5, 6, 7, 0]
        assert [(name, reader.batches_done) for name, reader in compiled.readers()] == [
            ("layer", 3)
        ]
    finally:
        compiled.close()


@pytest.mark.parametrize("backend", list(Backend))
def test_the_layers_above_follow_the_size_of_each_record(tmp_path: Path, backend: Backend) -> None:
    sizes = [(3, 4), (6, 5), (5, 7), (3, 4)]
    images = [np.full((2, *size), index, np.uint8) for index, size in enumerate(sizes)]
    records = ((b"%d" % index, encode_datum(image, index)) for index, image in enumerate(images))
    make_database(tmp_path / "db", backend, records)
    weights = "weight_filler { type: 'constant' value: 1 }"
    conv = f"convolution_param {{ num_output: 1 kernel_size: 3 {weights} }}"
    above = layer("Convolution", "data", "c", conv, name="conv")
    compiled = net(tmp_path, f"batch_size: 1 backend: {backend.name}", above=above)
    try:
        for index in (0, 1, 2, 3, 0, 1):
            tops = compiled()
            high, wide = sizes[index]
            assert torch.equal(tops["c"], torch.full((1, 1, high - 2, wide - 2), 18.0 * index))
            assert tops["label"].tolist() == [index]
            assert compiled.blob_shapes["data"] == (1, 2, high, wide)
    finally:
        compiled.close()
    fixed = net(
        tmp_path, f"batch_size: 1 backend: {backend.name}", rest="transform_param { crop_size: 3 }"
    )
    assert not fixed.changing_slots  # such nets are fused
    fixed.close()


def test_without_label(tmp_path: Path) -> None:
    write(tmp_path / "db")
    compiled = net(tmp_path, "batch_size: 2 backend: LMDB", tops="data")
    try:
        assert list(compiled()) == ["data"]
    finally:
        compiled.close()


def test_workers_of_a_shared_database_stride(tmp_path: Path) -> None:
    write(tmp_path / "db")
    labels = []
    for rank in range(2):
        place = {"rank": rank, "workers": 2, "client": rank, "clients": 2}
        compiled = net(tmp_path, "batch_size: 2 backend: LMDB shared_file_system: true", **place)
        labels.append(compiled()["label"].tolist())
        compiled.close()
    assert labels == [[0, 2], [1, 3]]


def test_clients_open_their_own_parts(tmp_path: Path) -> None:
    write(tmp_path / "db_0")
    write(tmp_path / "db_1", start=50)
    compiled = net(tmp_path, "batch_size: 2 backend: LMDB", client=1, clients=2, rank=1, workers=2)
    assert compiled()["label"].tolist() == [50, 51]
    compiled.close()


def test_a_part_alone_decides_which_folder_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "db_1", start=50)
    text = layer(
        "Data", "", "data label", 'data_param { source: "db" batch_size: 2 backend: LMDB }'
    )
    context = LayerContext(phase=TRAIN, seed=1, client=1, clients=2)
    compiled = compile_net(definition(text), context, state=NetState(phase=TRAIN))
    assert compiled()["label"].tolist() == [50, 51]
    compiled.close()


def test_crop_changes_the_shape(tmp_path: Path) -> None:
    write(tmp_path / "db")
    compiled = net(tmp_path, "batch_size: 2 backend: LMDB", rest="transform_param { crop_size: 2 }")
    assert compiled.blob_shapes["data"] == (2, 2, 2, 2)
    compiled.close()


def test_a_missing_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"the database .*db does not exist: create it first with poseidon make_db"
    ):
        net(tmp_path, "batch_size: 2 backend: LMDB")


def test_a_missing_database_is_named_before_its_mean_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the database .*db does not exist"):
        net(
            tmp_path,
            "batch_size: 2 backend: LMDB",
            rest='transform_param { mean_file: "mean.binaryproto" }',
        )


def test_a_net_that_fails_to_compile_lets_go_of_its_database(tmp_path: Path) -> None:
    write(tmp_path / "db", Backend.LEVELDB)
    with pytest.raises(DefinitionError, match="missing num_output"):
        net(
            tmp_path,
            "batch_size: 2",
            rest='} layer { name: "r" type: "InnerProduct" bottom: "data" top: "y"',
        )
    net(tmp_path, "batch_size: 2").close()


@pytest.mark.parametrize(("flag", "channels"), [("", 1), ("force_encoded_color: true", 3)])
def test_gray_images_become_color_with_force_encoded_color(
    tmp_path: Path, flag: str, channels: int
) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.full((3, 4), 7, np.uint8)).save(picture, "PNG")
    with write_database(tmp_path / "db", Backend.LMDB) as writer:
        writer.put(b"0", Datum(data=picture.getvalue(), encoded=True, label=1).SerializeToString())
    compiled = net(tmp_path, f"batch_size: 2 backend: LMDB {flag}")
    try:
        assert compiled()["data"].shape == (2, channels, 3, 4)
    finally:
        compiled.close()
