"""The command: flags in both spellings, last lines, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from poseidon.caffe.data.databases import Backend
from poseidon.cli.main import parse_arguments, run_command
from poseidon.errors import DataError, UsageError
from tests.support.databases import make_pictures


def run(*words: str) -> int:
    return run_command(parse_arguments(["partition_data", *words]))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--backend=leveldb"],
        ["-backend", "leveldb", "-num_partitions", "2"],
        ["--backend", "LEVELDB"],
    ],
)
def test_dividing(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    path = make_pictures(tmp_path / "db", 5, backend=Backend.LEVELDB)
    assert run(*flags, f"{path}/") == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["db", "db_0", "db_1"]
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [f"{path} has 5 records.", f"Done: {path}_0 to {path}_1."]
    assert captured.err == "", "no bar where there is no terminal"


def test_the_wrong_backend(tmp_path: Path) -> None:
    path = make_pictures(tmp_path / "db", 5, backend=Backend.LEVELDB)
    with pytest.raises(DataError, match=r"was named as LMDB: write --backend=leveldb$"):
        run("--backend=lmdb", str(path))


def test_a_backend_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run("--backend=hdf5", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distribute"], "--distribute needs --hostfile"),
        (["--hostfile=machines", "--num_partitions=3"], "--num_partitions=3"),
    ],
)
def test_flags_that_contradict_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machines").write_text("0 a 0\n1 b 0\n2 c 0 role=server\n")
    with pytest.raises(UsageError, match=message):
        run(*flags, str(make_pictures(tmp_path / "db", 5)))


def test_a_hostfile_of_this_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machines").write_text("0 127.0.0.1 0\n1 localhost 0\n2 127.0.0.1 0\n")
    path = make_pictures(tmp_path / "db", 5)
    words = [f"--hostfile={tmp_path}/machines", "--distribute", str(path)]
    assert run(*words) == 0
    here = [
        f"client {k} ({host}): this machine, where its part is"
        for k, host in enumerate(["127.0.0.1", "localhost", "127.0.0.1"])
    ]
    done = f"Done: {path}_0 to {path}_2."
    assert capsys.readouterr().out.splitlines() == [f"{path} has 5 records.", *here, done]
    assert run(*words) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path} is divided already.", *here, done]
    assert run(*words, "--replace") == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{path} has 5 records."
