"""Dividing a database: each record once, all parts or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poseidon.caffe.data.batches.hdf5_rows import RowMaker, RowPlan, read_file_list
from poseidon.caffe.data.batches.lists import read_windows
from poseidon.caffe.data.batches.numbered import Share
from poseidon.caffe.data.cursor import open_cursor, records
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.split import (
    ListKind,
    is_divided,
    list_kind,
    listed_images,
    part_files,
    partition_data,
)
from poseidon.errors import DataError, UsageError
from tests.support.databases import BACKENDS, make_database, make_pictures

WINDOWS = """# 0
a.jpg
3
10
10
2
1 0.9 0 0 5 5
0 0.1 1 1 5 5
# 1
b b.jpg
3
10
10
0

# 2
c.jpg
3
10
10
1
2 0.8 0 0 5 5
"""


def make_rows(folder: Path, counts: list[int]) -> Path:
    """A list of HDF5 files; row r of all of them has data (r, -r) and label r."""
    at = 0
    for number, count in enumerate(counts):
        rows = np.arange(at, at + count)
        with h5py.File(folder / f"f{number}.h5", "w") as file:
            file["data"] = np.stack([rows, -rows], 1).astype(np.float32)
            file["label"] = rows.astype(np.int16)
        at += count
    source = folder / "list.txt"
    source.write_text("".join(f"f{number}.h5\n" for number in range(len(counts))))
    return source


def rows_of(source: Path) -> list[tuple[float, ...]]:
    found = []
    for name in read_file_list(source):
        with h5py.File(source.parent / name) as file:
            assert file["label"].dtype == np.int16, "kinds of numbers are kept"
            found += [
                (*data, label)
                for data, label in zip(file["data"][()], file["label"][()], strict=True)
            ]
    return found


@pytest.mark.parametrize("counts", [[7], [3, 1, 4, 2], [1, 1, 1], [2, 9]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_are_dealt_one_at_a_time_over_all_files(
    tmp_path: Path, counts: list[int], parts: int
) -> None:
    source = make_rows(tmp_path, counts)
    everything = [(float(r), float(-r), float(r)) for r in range(sum(counts))]
    assert partition_data(source, parts) == sum(counts)
    for part in range(parts):
        assert rows_of(tmp_path / f"list.txt_{part}") == everything[part::parts]
    assert rows_of(source) == everything


def test_large_datasets_pass_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.caffe.data.prepare.split.BLOCK_BYTES", 40)
    source = make_rows(tmp_path, [50, 23])
    partition_data(source, 3)
    assert rows_of(tmp_path / "list.txt_1") == [
        (float(r), float(-r), float(r)) for r in range(1, 73, 3)
    ]


def test_a_divided_list_feeds_the_reader_what_one_process_reads(tmp_path: Path) -> None:
    source = make_rows(tmp_path, [5, 4, 3])
    partition_data(source, 2)

    def first_batch(path: Path, size: int) -> list[float]:
        files = [path.parent / name for name in read_file_list(path)]
        plan = RowPlan(batch_size=size, names=("label",), share=Share(), seed=1)
        return RowMaker(files, plan).tensors(0)[0].tolist()

    dealt = zip(*(first_batch(tmp_path / f"list.txt_{part}", 4) for part in range(2)), strict=True)
    assert [label for pair in dealt for label in pair] == first_batch(source, 8)


def test_parts_of_rows_are_replaced_with_their_folders(tmp_path: Path) -> None:
    source = make_rows(tmp_path, [5])
    partition_data(source, 3)
    with pytest.raises(DataError, match=r"list.txt_0\.rows exists already"):
        partition_data(source, 2)
    assert partition_data(source, 2, replace=True) == 5
    names = sorted(entry.name for entry in tmp_path.iterdir() if "_" in entry.name)
    assert names == ["list.txt_0", "list.txt_0.rows", "list.txt_1", "list.txt_1.rows"]


def test_parts_keep_names_of_any_encoding_and_no_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfcaf\xe9.jpg 1\r\nb.jpg 2\r\n")
    assert partition_data(tmp_path / "list", 2) == 2
    assert [(tmp_path / f"list_{part}").read_bytes() for part in (0, 1)] == [
        b"caf\xe9.jpg 1\n",
        b"b.jpg 2\n",
    ]


def test_windows_stay_with_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(WINDOWS)
    assert partition_data(tmp_path / "list", 2) == 3
    first = read_windows(tmp_path / "list_0", "", fg_threshold=0.5, bg_threshold=0.5)
    assert [path.name for path in first.images] == ["a.jpg", "c.jpg"]
    assert [window.label for window in first.foreground] == [1, 2]
    second = read_windows(tmp_path / "list_1", "", fg_threshold=0.5, bg_threshold=0.5)
    assert [path.name for path in second.images] == ["b b.jpg"]


def test_kinds_of_lists(tmp_path: Path) -> None:
    assert list_kind(make_rows(tmp_path, [1])) is ListKind.ROWS
    (tmp_path / "pictures").write_text("\na b.jpg 3\na b.jpg 4\nc.jpg 1\n")
    assert list_kind(tmp_path / "pictures") is ListKind.IMAGES
    assert listed_images(tmp_path / "pictures", "root/") == [
        Path("root/a b.jpg"),
        Path("root/c.jpg"),
    ]
    (tmp_path / "windows").write_text(WINDOWS)
    assert [path.name for path in listed_images(tmp_path / "windows", "")] == [
        "a.jpg",
        "b b.jpg",
        "c.jpg",
    ]


def damage_missing(folder: Path) -> None:
    (folder / "f1.h5").unlink()


def damage_group(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "a") as file:
        file.create_group("more")


def damage_rows(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "a") as file:
        file["more"] = np.zeros(9)


def damage_bytes(folder: Path) -> None:
    (folder / "f1.h5").write_bytes(b"no HDF5")


def damage_nothing_inside(folder: Path) -> None:
    with h5py.File(folder / "f1.h5", "w"):
        pass


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "there is no HDF5 file f1.h5"),
        (damage_group, "f1.h5: 'more' is not a dataset of rows"),
        (damage_rows, r"f1.h5: its datasets have \[2, 9\] rows"),
        (damage_bytes, "f1.h5 cannot be read as HDF5"),
        (damage_nothing_inside, "f1.h5 has no dataset"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_that_cannot_be_divided(tmp_path: Path, damage: object, message: str) -> None:
    source = make_rows(tmp_path, [3, 2])
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        partition_data(source, 2)
    assert not (tmp_path / "list.txt_0").exists()


def test_more_parts_than_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="into 4 parts: it has only 3 rows"):
        partition_data(make_rows(tmp_path, [1, 2]), 4)
    assert not list(tmp_path.glob("list.txt_*"))


def test_a_text_that_is_no_list_of_images(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text('name: "n"\nlayer {\n}\n')
    with pytest.raises(DataError, match=r"net\.prototxt:1"):
        partition_data(tmp_path / "net.prototxt", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["net.prototxt"]


def test_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        partition_data(tmp_path / "list", 1)


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
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.thorough),
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough),
    ],
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
