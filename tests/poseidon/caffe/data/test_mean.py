"""Mean files in and out, and the exact mean of a database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.data.cursor import open_cursor
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import encode_datum
from poseidon.caffe.data.mean import compute_mean, mean_blob, read_mean
from poseidon.caffe.proto.caffe_pb2 import BlobProto, BlobShape
from poseidon.errors import DataError
from tests.support.databases import BACKENDS, make_database, make_pictures, picture

MEAN = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "mean").write_bytes(mean_blob(MEAN))
    np.testing.assert_array_equal(read_mean(tmp_path / "mean"), MEAN)


@pytest.mark.parametrize("shape", [[1, 2, 3, 4], [2, 3, 4]])
def test_the_new_form_of_a_blob(tmp_path: Path, shape: list[int]) -> None:
    blob = BlobProto(shape=BlobShape(dim=shape), double_data=MEAN.ravel().tolist())
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    np.testing.assert_array_equal(read_mean(tmp_path / "mean"), MEAN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xff", "not a binary BlobProto"),
        (b"", "0 values"),
        (
            BlobProto(num=1, channels=2, height=2, width=2, data=[1] * 7).SerializeToString(),
            "7 values",
        ),
        (
            BlobProto(num=2, channels=1, height=1, width=1, data=[1] * 2).SerializeToString(),
            "1 x C x H x W",
        ),
    ],
)
def test_files_that_are_no_mean(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mean").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_mean(tmp_path / "mean")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mean_of_a_database(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 11, backend=backend)
    with closing(open_cursor(path, backend)) as cursor:
        mean = compute_mean(cursor)
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(
        mean, np.mean([picture(i) for i in range(11)], axis=0).astype(np.float32)
    )


def test_records_of_two_shapes_have_no_mean(tmp_path: Path) -> None:
    records = [
        (b"a", encode_datum(picture(0, (1, 2, 2)), 0)),
        (b"b", encode_datum(picture(0, (1, 2, 3)), 0)),
    ]
    path = make_database(tmp_path / "db", Backend.LMDB, records)
    with (
        closing(open_cursor(path, Backend.LMDB)) as cursor,
        pytest.raises(DataError, match="key 'b' has shape"),
    ):
        compute_mean(cursor)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LMDB, [(b"a", b"rubbish!")])
    with (
        closing(open_cursor(path, Backend.LMDB)) as cursor,
        pytest.raises(DataError, match="db: record with key 'a'"),
    ):
        compute_mean(cursor)
