"""Every record once: over workers, clients, batches that do not divide the data, and data of any
kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import decode, encode_datum
from poseidon.caffe.data.prepare.split import partition_data
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.caffe.tools.extractor import datums, run_extraction
from poseidon.caffe.tools.preflight import Extraction
from poseidon.errors import DataError, JobError, UsageError
from poseidon.exchange.membership import Membership
from ps_server.network import Network
from tests.support.databases import make_database, make_pictures, picture

COUNT = 23
NET = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  data_param { source: "db" backend: LMDB batch_size: 4 shared_file_system: true } }
layer { name: "double" type: "Power" bottom: "data" top: "double" power_param { scale: 2 } }
layer { name: "flat" type: "Flatten" bottom: "double" top: "flat" }
layer { name: "sum" type: "Reduction" bottom: "flat" top: "one" }
"""


@pytest.fixture
def whole(tmp_path: Path) -> Extraction:
    make_pictures(tmp_path / "db", COUNT)
    (tmp_path / "net.prototxt").write_text(NET.replace("Reduction", "Softmax"), encoding="utf-8")
    return Extraction(
        model=str(tmp_path / "net.prototxt"),
        weights=(),
        blobs=("double", "flat"),
        databases=(str(tmp_path / "f_double"), str(tmp_path / "f_flat")),
        backend="leveldb",
    )


def read(path: Path, backend: Backend = Backend.LEVELDB) -> list[tuple[bytes, Datum]]:
    cursor = open_cursor(path, backend)
    found = [(key, Datum.FromString(bytes(value))) for key, value in records(cursor)]
    cursor.close()
    return found


def labels(paths: list[Path]) -> list[int]:
    return sorted(datum.label for path in paths for _, datum in read(path))


@pytest.mark.parametrize("backend", Backend)
def test_records_are_caffes(whole: Extraction, tmp_path: Path, backend: Backend) -> None:
    assert run_extraction(replace(whole, backend=backend.suffix)) == COUNT
    found = read(tmp_path / "f_double", backend)
    assert [key for key, _ in found] == [b"%010d" % number for number in range(COUNT)]
    for number, (_, datum) in enumerate(found):
        assert (datum.label, datum.channels, datum.height, datum.width) == (number, 3, 4, 5)
        assert not datum.data
        array, _ = decode(datum.SerializeToString())
        np.testing.assert_array_equal(array, 2.0 * picture(number))
    _, flat = read(tmp_path / "f_flat", backend)[7]
    assert (flat.channels, flat.height, flat.width) == (60, 1, 1)
    assert list(flat.float_data) == (2.0 * picture(7)).ravel().tolist()


def test_a_label_that_a_datum_cannot_hold(whole: Extraction, tmp_path: Path) -> None:
    text = """layer { name: "d" type: "DummyData" top: "x" top: "label" dummy_data_param {
      shape { dim: 2 dim: 3 } shape { dim: 2 } data_filler { type: "constant" } data_filler { type: "constant" value: nan } } }"""
    (tmp_path / "net.prototxt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="blob 'label' has the label nan"):
        run_extraction(replace(whole, blobs=("x",), databases=(str(tmp_path / "f"),), batches=1))
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_records_of_many_sizes(tmp_path: Path, workers: int) -> None:
    shapes = [(3, 4, 5), (3, 6, 6), (3, 9, 7), (3, 4, 5), (3, 5, 4)]
    records = ((b"%d" % n, encode_datum(picture(n, shape), n)) for n, shape in enumerate(shapes))
    make_database(tmp_path / "db", Backend.LMDB, records)
    model = tmp_path / "net.prototxt"
    model.write_text(
        "\n".join(NET.replace("batch_size: 4", "batch_size: 1").splitlines()[:4]), encoding="utf-8"
    )
    job = {"job": "j"} if workers > 1 else {}
    for rank in range(workers):
        database = str(tmp_path / "f_double")
        own = Extraction(
            model=str(model),
            weights=(),
            blobs=("double",),
            databases=(database,),
            backend="leveldb",
            member=Membership(network=Network(rank=rank, size=workers)),
            **job,
        )
        assert run_extraction(own) == len(range(rank, len(shapes), workers))
        for number, (_, datum) in zip(
            range(rank, len(shapes), workers), read(own.paths()[0]), strict=True
        ):
            array, label = decode(datum.SerializeToString())
            assert label == number
            np.testing.assert_array_equal(array, 2.0 * picture(number, shapes[number]))


@pytest.mark.parametrize("hosts", [(1,), (1, 1), (3,), (2, 2), (3, 3, 3, 3), (1, 3)])
def test_each_record_once_over_workers(whole: Extraction, hosts: tuple[int, ...]) -> None:
    paths = []
    for rank in range(sum(hosts)):
        network = Network(rank=rank, size=sum(hosts))
        own = replace(whole, job="j", member=Membership(network=network, hosts=hosts))
        if run_extraction(own):
            paths.append(own.paths()[0])
    assert labels(paths) == list(range(COUNT))


def test_each_record_once_over_divided_data(whole: Extraction, tmp_path: Path) -> None:
    partition_data(tmp_path / "db", 2)
    text = (
        (tmp_path / "net.prototxt")
        .read_text(encoding="utf-8")
        .replace("file_system: true", "file_system: false")
    )
    (tmp_path / "net.prototxt").write_text(text, encoding="utf-8")
    paths = []
    for client in range(2):
        member = Membership(network=Network(rank=client, size=2))
        own = replace(whole, job="j", member=member)
        run_extraction(own)
        paths.append(own.paths()[0])
    assert labels(paths) == list(range(COUNT))


def test_a_number_of_batches_is_a_limit(whole: Extraction, tmp_path: Path) -> None:
    assert run_extraction(replace(whole, batches=2)) == 8
    assert labels([tmp_path / "f_flat"]) == list(range(8))
    again = replace(whole, batches=1000, databases=(f"{tmp_path}/g", f"{tmp_path}/h"))
    assert run_extraction(again) == COUNT


def test_data_without_an_end_needs_a_number(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(
        'layer { name: "d" type: "DummyData" top: "d" dummy_data_param { shape { dim: 3 dim: 2 } '
        '} } layer { name: "r" type: "Reduction" bottom: "d" top: "r" }',
        encoding="utf-8",
    )
    one = Extraction(
        model=str(net),
        weights=(),
        blobs=("d",),
        databases=(str(tmp_path / "f"),),
        backend="leveldb",
    )
    with pytest.raises(UsageError, match="its data has no end; give NUM_MINI_BATCHES"):
        run_extraction(one)
    assert run_extraction(replace(one, batches=2)) == 6
    with pytest.raises(UsageError, match="blob 'r' has no rows, expected one a record"):
        run_extraction(replace(one, batches=2, blobs=("r",)))


def test_breaking_off_leaves_nothing(whole: Extraction, tmp_path: Path) -> None:
    def stop(batches: int, total: int, done: int) -> None:
        assert (batches, total, done) == (1, 6, 4)
        raise JobError("stop")

    with pytest.raises(JobError, match="stop"):
        run_extraction(whole, stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "net.prototxt"]


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        (("double", "flar"), "flar"),
        (("double", "scalar"), "blob 'scalar' has no rows for a batch of 4 records"),
    ],
)
def test_blobs_that_will_not_do(
    whole: Extraction, tmp_path: Path, blobs: tuple[str, ...], message: str
) -> None:
    text = (tmp_path / "net.prototxt").read_text(encoding="utf-8")
    more = 'layer { name: "s" type: "EuclideanLoss" bottom: "flat" bottom: "flat" top: "scalar" }'
    (tmp_path / "net.prototxt").write_text(text + more, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        run_extraction(replace(whole, blobs=blobs))
    assert not (tmp_path / "f_double").exists()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2,), (1, 1, 1)),
        ((2, 5), (5, 1, 1)),
        ((2, 3, 4), (3, 4, 1)),
        ((2, 3, 4, 5), (3, 4, 5)),
        ((2, 3, 4, 5, 2), (120, 1, 1)),
    ],
)
def test_shapes(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    features = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = [Datum.FromString(datum) for datum in datums(features, np.array([3, 4]))]
    assert [(d.channels, d.height, d.width) for d in found] == [expected] * 2
    assert [d.label for d in found] == [3, 4]
    assert list(found[1].float_data) == features[1].ravel().tolist()
