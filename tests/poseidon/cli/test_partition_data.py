"""The command: flags in both spellings, last lines, errors."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from poseidon.cli.partition_data import add_parser
from poseidon.data.database import Backend
from poseidon.errors import DataError
from tests.support.databases import make_pictures


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["partition_data", *words])
    return int(arguments.run(arguments))


@pytest.mark.parametrize(
    "flags",
    [[], ["--backend=leveldb"], ["-backend", "leveldb", "-num_partitions", "2"], ["--backend", "LEVELDB"]],
)
def test_dividing(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    path = make_pictures(tmp_path / "db", 5, backend=Backend.LEVELDB)
    assert run(*flags, f"{path}/") == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["db", "db_0", "db_1"]
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["Processed 5 files.", f"Done: {path}_0 to {path}_1."]
    assert captured.err == "", "no bar where there is no terminal"


def test_the_wrong_backend(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 5, backend=Backend.LEVELDB)
    with pytest.raises(DataError, match="is LevelDB, but was named as LMDB"):
        run("--backend=lmdb", str(path))


def test_a_backend_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run("--backend=hdf5", str(tmp_path))
