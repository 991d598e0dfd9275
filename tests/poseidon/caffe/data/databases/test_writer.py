"""Databases appear complete or not at all."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from poseidon.caffe.data.databases import writer as writer_module
from poseidon.caffe.data.databases.cursor import open_cursor, records
from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.databases.writer import write_database
from poseidon.errors import DataError
from tests.support.databases import BACKENDS

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def contents(path: Path, backend: Backend) -> dict[bytes, bytes]:
    with closing(open_cursor(path, backend)) as cursor:
        return {key: bytes(value) for key, value in records(cursor)}


@every_backend
@pytest.mark.parametrize("count", [1, 999, 1000, 2001])
def test_records_come_back(tmp_path: Path, backend: Backend, count: int) -> None:
    # 7 and the counts share no factor, so every key is written, in no order.
    expected = {b"%05d" % (i * 7 % count): b"v%d" % i for i in range(count)}
    with write_database(tmp_path / "db", backend) as writer:
        for key, value in expected.items():
            writer.put(key, value)
        assert not (tmp_path / "db").exists()
    assert contents(tmp_path / "db", backend) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["db"]


@every_backend
def test_a_path_that_is_not_utf_8(tmp_path: Path, backend: Backend) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9")
    with write_database(path, backend) as writer:
        writer.put(b"key", b"value")
    assert contents(path, backend) == {b"key": b"value"}


@every_backend
def test_a_later_record_with_the_same_key_counts(tmp_path: Path, backend: Backend) -> None:
    with write_database(tmp_path / "db", backend) as writer:
        for key, value in [(b"b", b"1"), (b"a", b"2"), (b"b", b"3")]:
            writer.put(key, value)
    assert contents(tmp_path / "db", backend) == {b"a": b"2", b"b": b"3"}


def test_an_lmdb_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "FIRST_MAP_BYTES", 1 << 16)
    expected = {b"%05d" % i: bytes(1000) for i in range(2500)}
    with write_database(tmp_path / "db", Backend.LMDB) as writer:
        for key, value in expected.items():
            writer.put(key, value)
    assert contents(tmp_path / "db", Backend.LMDB) == expected


@every_backend
def test_an_error_leaves_nothing(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(ZeroDivisionError), write_database(tmp_path / "db", backend) as writer:
        writer.put(b"k", b"v")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@every_backend
def test_what_exists_is_not_overwritten(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "db").mkdir()
    with (
        pytest.raises(DataError, match="db exists already and is not overwritten"),
        write_database(tmp_path / "db", backend),
    ):
        pass
    assert list((tmp_path / "db").iterdir()) == []


@pytest.mark.parametrize(("free", "why"), [(0, "No space left"), (1 << 30, "Input/output error")])
def test_a_full_disk_under_lmdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, why: str
) -> None:
    """Its commit has written a part of the pages then, and reports EIO."""

    class Unwritable:
        def begin(self, *, write: bool) -> None:
            raise lmdb.Error("mdb_txn_commit: Input/output error")

        def close(self) -> None: ...

    disk = SimpleNamespace(f_bavail=free // 512, f_frsize=512)
    monkeypatch.setattr("os.statvfs", lambda _: disk)
    monkeypatch.setattr("lmdb.open", lambda *_, **__: Unwritable())
    with pytest.raises(DataError, match=why), write_database(tmp_path / "db", Backend.LMDB) as db:
        db.put(b"k", b"v")


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"db cannot be written: .*No space left"):  # noqa: SIM117
        with write_database(tmp_path / "db", Backend.LMDB):
            raise OSError(28, "No space left on device")
