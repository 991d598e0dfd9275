"""Dividing a database: each record once, all parts or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poseidon.caffe.data.databases.cursor import open_cursor, records
from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.split import is_divided, part_files, partition_data
from poseidon.errors import DataError, UsageError
from tests.poseidon.caffe.data.prepare.test_split_list import WINDOWS, make_rows
from tests.support.databases import BACKENDS, make_database, make_pictures

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def contents(path: Path, backend: Backend) -> list[tuple[bytes, bytes]]:
    with closing(open_cursor(path, backend)) as cursor:
        return [(key, bytes(value)) for key, value in records(cursor)]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@every_backend
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    keys=st.sets(st.binary(min_size=1, max_size=6), min_size=1, max_size=12),
    parts=st.integers(1, 5),
)
def test_each_record_is_in_exactly_one_part(
    tmp_path_factory: pytest.TempPathFactory, backend: Backend, keys: set[bytes], parts: int
) -> None:
    parts = min(parts, len(keys))
    path = make_database(
        tmp_path_factory.mktemp("db") / "db", backend, [(key, key * 3) for key in keys]
    )
    told: list[tuple[int, int]] = []
    assert partition_data(
        path, parts, report=lambda _, done, total: told.append((done, total))
    ) == len(keys)
    in_order = [(key, key * 3) for key in sorted(keys)]
    for part in range(parts):
        assert contents(path.with_name(f"db_{part}"), backend) == in_order[part::parts]
    assert contents(path, backend) == in_order
    assert names(path.parent) == ["db", *(f"db_{part}" for part in range(parts))]
    assert told == [(n + 1, len(keys)) for n in range(len(keys))]


@every_backend
def test_nothing_is_overwritten(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 5, backend=backend)
    (tmp_path / "db_1").mkdir()
    with pytest.raises(
        DataError, match=rf"{tmp_path}/db_1 exists already and is not overwritten: give --replace"
    ):
        partition_data(path, 2)
    assert names(tmp_path) == ["db", "db_1"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [(0, "into 0 parts: expected at least 1"), (6, "into 6 parts: it has only 5 records")],
)
def test_numbers_of_parts_that_make_no_sense(tmp_path: Path, parts: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        partition_data(make_pictures(tmp_path / "db", 5), parts)
    assert names(tmp_path) == ["db"]


def test_a_missing_database(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none does not exist"):
        partition_data(tmp_path / "none", 2)


@every_backend
def test_an_interrupt_leaves_nothing(tmp_path: Path, backend: Backend) -> None:
    path = make_pictures(tmp_path / "db", 50, backend=backend)

    def interrupt(activity: str, done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition_data(path, 3, report=interrupt)
    assert names(tmp_path) == ["db"]
    assert partition_data(path, 3) == 50


# Says that it is in the middle, then waits for its end.
HALFWAY = """
import signal
import sys
from pathlib import Path
from poseidon.caffe.data.prepare.split import partition_data

def report(activity, done, total):
    if done == total // 2:
        print("halfway", flush=True)
        sys.stdin.read()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has those that it starts with & ignore it
partition_data(Path(sys.argv[1]), 3, report=report)
"""


@pytest.mark.processes
@every_backend
@pytest.mark.parametrize(
    "blow",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)],
)
def test_a_run_that_is_ended_midway(tmp_path: Path, backend: Backend, blow: signal.Signals) -> None:
    path = make_pictures(tmp_path / "db", 3000, backend=backend, shape=(1, 1, 2))
    with subprocess.Popen(
        [sys.executable, "-c", HALFWAY, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        if backend is Backend.LMDB:
            with pytest.raises(DataError, match="is being created by another process"):
                partition_data(path, 3)
        process.send_signal(blow)
        assert process.wait(30) != 0
    left = names(tmp_path)
    assert left == (["db"] if blow is signal.SIGINT else [".db-parts.partial", "db"])
    assert partition_data(path, 3) == 3000
    assert names(tmp_path) == ["db", "db_0", "db_1", "db_2"]
    together = sorted(
        record for part in range(3) for record in contents(tmp_path / f"db_{part}", backend)
    )
    assert together == contents(path, backend)


def test_a_list_is_dealt_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a b.png 0\nc.png 1\n\nd.png 2\n")
    assert partition_data(tmp_path / "list", 2) == 3
    assert (tmp_path / "list_0").read_text() == "a b.png 0\nd.png 2\n"
    assert (tmp_path / "list_1").read_text() == "c.png 1\n"
    assert names(tmp_path) == ["list", "list_0", "list_1"]
    with pytest.raises(DataError, match="list_0 exists already"):
        partition_data(tmp_path / "list", 2)
    assert partition_data(tmp_path / "list", 3, replace=True) == 3
    assert names(tmp_path) == ["list", "list_0", "list_1", "list_2"]


def test_lists_that_cannot_be_divided(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a.png 0\n")
    with pytest.raises(UsageError, match="it has only 1 lines"):
        partition_data(tmp_path / "list", 2)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="neither a database nor a list"):
        partition_data(tmp_path / "bytes", 2)
    assert names(tmp_path) == ["bytes", "list"]


@pytest.mark.parametrize(
    ("backend", "last"), [(Backend.LMDB, "data.mdb"), (Backend.LEVELDB, "CURRENT")]
)
def test_a_database_ends_with_what_it_is_known_by(
    tmp_path: Path, backend: Backend, last: str
) -> None:
    source = make_pictures(tmp_path / "db", 5, backend=backend)
    partition_data(source, 2)
    found = part_files(source, 1)
    assert found.folders == (tmp_path / "db_1",)
    assert found.files[-1] == tmp_path / "db_1" / last
    there = {
        path
        for path in (tmp_path / "db_1").iterdir()
        if path.name not in ("LOCK", "LOG", "lock.mdb")
    }
    assert set(found.files) == there


def test_lists_bring_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a.jpg 0\nb.jpg 1\nc d.jpg 2\na.jpg 3\na.jpg 4\n")
    partition_data(tmp_path / "list", 2)
    root = f"{tmp_path}/pictures/"
    pictures = [Path(root + name) for name in ("a.jpg", "c d.jpg")]
    assert part_files(tmp_path / "list", 0, root=root).files == (*pictures, tmp_path / "list_0")
    (tmp_path / "windows").write_text(WINDOWS)
    partition_data(tmp_path / "windows", 2)
    assert part_files(tmp_path / "windows", 1).files == (Path("b b.jpg"), tmp_path / "windows_1")
    source = make_rows(tmp_path, [3, 4])
    partition_data(source, 2)
    rows = tmp_path / "list.txt_0.rows"
    found = part_files(source, 0)
    assert found.files == (rows / "00000.h5", rows / "00001.h5", tmp_path / "list.txt_0")
    assert found.folders == (rows,)


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a.jpg 0\n")
    with pytest.raises(DataError, match="list_0 does not exist"):
        part_files(tmp_path / "list", 0)
    with pytest.raises(DataError, match="db_0 does not exist"):
        part_files(make_pictures(tmp_path / "db", 1), 0)


def test_whether_a_source_is_divided(tmp_path: Path) -> None:
    assert not is_divided(tmp_path / "list", 2)
    (tmp_path / "list").write_text("a.jpg 0\nb.jpg 1\nc.jpg 2\n")
    assert not is_divided(tmp_path / "list", 2)
    partition_data(tmp_path / "list", 2)
    assert is_divided(tmp_path / "list", 2)
    with pytest.raises(DataError, match="is divided into 2 parts, not into 3"):
        is_divided(tmp_path / "list", 3)
    later_s = (tmp_path / "list_0").stat().st_mtime + 10
    os.utime(tmp_path / "list", (later_s, later_s))
    with pytest.raises(DataError, match="list has changed since it was divided"):
        is_divided(tmp_path / "list", 2)
