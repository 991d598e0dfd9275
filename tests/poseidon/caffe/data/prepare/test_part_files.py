"""Which files a part is made of, and whether a source lies there divided."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.prepare.part_files import is_divided, part_files
from poseidon.caffe.data.prepare.split import partition_data
from poseidon.errors import DataError
from tests.poseidon.caffe.data.prepare.test_split_list import WINDOWS, make_rows
from tests.support.databases import make_pictures


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
