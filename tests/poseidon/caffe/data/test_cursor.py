"""The contract of a cursor, which both backends keep; and the ways in which a database can be
unusable.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poseidon.caffe.data import cursor as writer_module
from poseidon.caffe.data import leveldb_cursor
from poseidon.caffe.data.cursor import open_cursor, records, write_database
from poseidon.caffe.data.databases import Backend
from poseidon.errors import DataError
from tests.support.databases import BACKENDS, make_database

every_backend = pytest.mark.parametrize("backend", BACKENDS)
COUNT = 7
# Written out of order: key order is what counts.
RECORDS = [(b"%02d" % (i * 3 % COUNT), b"value %d" % (i * 3 % COUNT)) for i in range(COUNT)]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.suffix)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Backend]:
    return make_database(tmp_path / "db", request.param, RECORDS), request.param


def test_key_order_and_wrap_around(database: tuple[Path, Backend]) -> None:
    with closing(open_cursor(*database)) as cursor:
        seen = []
        for _ in range(2 * COUNT + 1):
            seen.append((cursor.position, cursor.key(), bytes(cursor.value())))
            cursor.skip(1)
        assert seen == [
            (i % COUNT, b"%02d" % (i % COUNT), b"value %d" % (i % COUNT))
            for i in range(2 * COUNT + 1)
        ]


def test_length(database: tuple[Path, Backend]) -> None:
    with closing(open_cursor(*database)) as cursor:
        cursor.skip(3)
        assert len(cursor) == COUNT
        assert cursor.key() == b"03", "counting does not move the cursor"


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 3 * COUNT)), max_size=12))
def test_any_walk_is_arithmetic_modulo_the_length(
    database: tuple[Path, Backend], moves: list[tuple[bool, int]]
) -> None:
    at = 0
    with closing(open_cursor(*database)) as cursor:
        for relative, amount in moves:
            if relative:
                cursor.skip(amount)
                at = (at + amount) % COUNT
            else:
                cursor.seek(amount)
                at = amount % COUNT
            assert (cursor.position, cursor.key()) == (at, b"%02d" % at)


def test_every_record_once(database: tuple[Path, Backend]) -> None:
    with closing(open_cursor(*database)) as cursor:
        cursor.skip(5)
        assert [(key, bytes(value)) for key, value in records(cursor)] == sorted(RECORDS)


@every_backend
def test_a_database_of_one_record(tmp_path: Path, backend: Backend) -> None:
    path = make_database(tmp_path / "db", backend, [(b"k", b"v")])
    with closing(open_cursor(path, backend)) as cursor:
        cursor.skip(5)
        assert cursor.position == 0
        assert [key for key, _ in records(cursor)] == [b"k"]


def test_two_cursors_in_one_process(database: tuple[Path, Backend]) -> None:
    with closing(open_cursor(*database)) as first, closing(open_cursor(*database)) as second:
        first.skip(2)
        assert (first.key(), second.key()) == (b"02", b"00")
        first.close()
        first.close()
        second.skip(1)
        assert second.key() == b"01"
    with closing(open_cursor(*database)) as again:
        assert again.key() == b"00"


@every_backend
def test_an_empty_database(tmp_path: Path, backend: Backend) -> None:
    path = make_database(tmp_path / "db", backend, [])
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{path} is empty"):
            open_cursor(path, backend)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a database: its data.mdb has 0 bytes"),
        (b"short", "cannot be read"),
        (bytes(10_000), "cannot be read: .*MDB_INVALID"),
    ],
)
def test_what_is_no_lmdb_is_left_as_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(DataError, match=says):
        open_cursor(tmp_path, Backend.LMDB)
    assert [path.name for path in tmp_path.iterdir()] == ["data.mdb"]


@every_backend
def test_links_to_what_is_not_of_the_database_are_not_written(
    tmp_path: Path, backend: Backend
) -> None:
    path, mine = make_database(tmp_path / "db", backend, RECORDS), tmp_path / "mine"
    mine.write_text("mine")
    (path / "LOCK").unlink(missing_ok=True)
    names = [f"MANIFEST-{number:06d}" for number in range(9)]
    for name in ("lock.mdb", "LOCK", *names):
        if not (path / name).exists():
            (path / name).symlink_to(mine)
    (path / "000004.dbtmp").symlink_to(tmp_path / "new")
    with closing(open_cursor(path, backend)) as cursor:
        assert len(cursor) == COUNT
    assert mine.read_text() == "mine" and not (tmp_path / "new").exists()


@every_backend
def test_a_database_of_links_is_read(tmp_path: Path, backend: Backend) -> None:
    path = make_database(tmp_path / "db", backend, RECORDS)
    (tmp_path / "linked").mkdir()
    for file in path.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    with closing(open_cursor(tmp_path / "linked", backend)) as cursor:
        assert len(cursor) == COUNT


def test_lmdb_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LMDB, RECORDS)
    path.chmod(0o555)
    try:
        with closing(open_cursor(path, Backend.LMDB)) as cursor:
            assert len(cursor) == COUNT
            assert os.access(path, os.W_OK) or not (path / "lock.mdb").exists()
    finally:
        path.chmod(0o755)


def test_lmdb_where_a_reader_in_another_container_has_this_process_id(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LMDB, RECORDS)
    open_cursor(path, Backend.LMDB).close()  # makes the lock file
    program = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, int(sys.argv[2])); print(); input()"
    argv = [sys.executable, "-c", program, str(path / "lock.mdb"), str(os.getpid())]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            with closing(open_cursor(path, Backend.LMDB)) as cursor:
                assert [bytes(value) for _, value in records(cursor)] == [
                    value for _, value in sorted(RECORDS)
                ]
        finally:
            other.kill()


def test_leveldb_in_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_database(tmp_path / "db", Backend.LEVELDB, RECORDS)
    (path / "LOCK").unlink()
    files = sorted(path.iterdir())
    real = os.open

    def refuse(name: Path, flags: int, *more: int, **settings: int) -> int:
        """Answer as the system does to one who is not the superuser."""
        if flags & os.O_CREAT and str(name).startswith(str(path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(name, flags, *more, **settings)

    monkeypatch.setattr(os, "open", refuse)
    with closing(open_cursor(path, Backend.LEVELDB)) as cursor:
        assert len(cursor) == COUNT
    assert sorted(path.iterdir()) == files


def test_an_lmdb_file_that_is_cut_short(tmp_path: Path) -> None:
    path = make_database(
        tmp_path / "db", Backend.LMDB, [(b"%05d" % i, bytes(3000)) for i in range(100)]
    )
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", size // 2)
    with pytest.raises(
        DataError, match=rf"{path} is truncated: data.mdb has {size // 2} of {size} bytes"
    ):
        open_cursor(path, Backend.LMDB)


def test_an_lmdb_that_the_script_has_open(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(lmdb.open(str(path))) as environment:
        with environment.begin(write=True) as transaction:
            transaction.put(b"a", b"1")
        with pytest.raises(DataError, match=r"this script has it open: call close\(\)"):
            open_cursor(path, Backend.LMDB)
    with closing(open_cursor(path, Backend.LMDB)) as cursor:
        assert cursor.key() == b"a"


def test_a_leveldb_without_its_manifest(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LEVELDB, RECORDS)
    for manifest in path.glob("MANIFEST*"):
        manifest.unlink()
    with pytest.raises(DataError, match=rf"the LevelDB database {path} cannot be read"):
        open_cursor(path, Backend.LEVELDB)


HOLDER = """
import sys
from pathlib import Path
from poseidon.caffe.data.cursor import open_cursor
cursor = open_cursor(Path(sys.argv[1]), int(sys.argv[2]))
print(cursor.key().decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
@every_backend
def test_a_second_process(tmp_path: Path, backend: Backend) -> None:
    """A database has any number of readers. Nobody writes to a LevelDB that is read."""
    path = make_database(tmp_path / "db", backend, RECORDS)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(int(backend))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "00\n"
        with closing(open_cursor(path, backend)) as cursor:
            assert len(cursor) == COUNT
        if backend is Backend.LEVELDB:
            with pytest.raises(leveldb_cursor.ERRORS, match="lock"):
                leveldb_cursor.require_leveldb().DB(str(path))
        holder.communicate("")


WRITER = """
import sys
from poseidon.caffe.data.leveldb_cursor import require_leveldb
database = require_leveldb().DB(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_leveldb_that_is_written(tmp_path: Path) -> None:
    path = make_database(tmp_path / "db", Backend.LEVELDB, RECORDS)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(DataError, match=f"a process writes to the LevelDB database {path}"):
            open_cursor(path, Backend.LEVELDB)
        writer.communicate("")
    open_cursor(path, Backend.LEVELDB).close()


@pytest.mark.parametrize(
    ("name", "count"),
    [("lmdb/train_lmdb", None), ("lmdb/test_lmdb", None), ("leveldb/mnist-test-leveldb", 10_000)],
)
def test_databases_that_caffe_wrote(
    shared: Path, tmp_path: Path, name: str, count: int | None
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(shared / "data" / "dbs" / name, path, copy_function=shutil.copyfile)
    backend = Backend.LMDB if name.startswith("lmdb") else Backend.LEVELDB
    with closing(open_cursor(path, backend)) as cursor:
        keys = [key for key, _ in records(cursor)]
        assert keys == sorted(keys)
        assert len(keys) == len(cursor) > 0
        assert count in (None, len(keys))


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
    with pytest.raises(DataError, match=r"db cannot be written: No space left"):  # noqa: SIM117
        with write_database(tmp_path / "db", Backend.LMDB):
            raise OSError(28, "No space left on device")
