"""Which library reads LevelDB.

Where it is missing, LevelDB is one sentence and everything else works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from poseidon.caffe.data import leveldb_cursor as leveldb
from poseidon.caffe.data.cursor import open_cursor, write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.prepare.cifar10 import Cifar10Request, prepare
from poseidon.cli.main import main
from poseidon.errors import DataError


@pytest.fixture
def no_plyvel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Python for which there are no wheels."""
    monkeypatch.setattr(leveldb, "PLYVEL", None)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (("plyvel_next", "plyvel"), "plyvel_next"),
        (("plyvel_next",), "plyvel_next"),
        (("plyvel",), "plyvel"),
        ((), None),
    ],
)
def test_the_newer_library_is_used_if_both_are_installed(
    installed: tuple[str, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in leveldb.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if name in installed else None)
    found = leveldb._library()
    assert (found and found.__name__) == expected


def write(folder: Path) -> None:
    with write_database(folder / "new", Backend.LEVELDB):
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: open_cursor(folder / "db", Backend.LEVELDB),
        write,
        lambda folder: prepare(Cifar10Request(folder=folder, backend=Backend.LEVELDB, url="")),
    ],
    ids=["read", "write", "cifar10"],
)
def test_every_use_names_the_remedy_and_leaves_nothing(
    no_plyvel: None, tmp_path: Path, use: Callable[[Path], object]
) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "CURRENT").write_text("MANIFEST-000001\n")
    with pytest.raises(DataError) as caught:
        use(tmp_path)
    package = "plyvel-next" if sys.version_info >= (3, 12) else "plyvel-ci"
    remedy = (
        f"{package}, which is not installed: use LMDB (--backend=lmdb), or pip install {package}"
    )
    assert remedy in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["db"]


def test_a_command_prints_the_error_on_one_line(
    no_plyvel: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_text("a.jpg 0\n")
    (tmp_path / "a.jpg").write_bytes(b"")
    paths = [f"{tmp_path}/{end}" for end in ("", "list", "db")]
    assert main(["convert_imageset", "--backend=leveldb", *paths]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("poseidon convert_imageset: LevelDB needs the Python package plyvel")
