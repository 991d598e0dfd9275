"""Keys for a job started by hand: a file for each process, which the shard and its workers can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_server.__main__ import parse
from ps_server.keys import read_keyring
from ps_server.make_keys import main


def test_a_file_for_each(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert main([str(folder), "--workers", "2", "--shards", "2"]) == 0
    assert folder.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard_0.keys",
        "shard_1.keys",
        "worker_0.keys",
        "worker_1.keys",
    ]
    shard, worker = read_keyring(folder / "shard_1.keys"), read_keyring(folder / "worker_0.keys")
    assert worker.expect[1] == shard.own.public
    assert shard.admit[0] == worker.own.public
    flags = ["--listen", "tcp://10.0.0.1:0", "--workers", "2", "--keys", str(folder / "shard_1.keys")]
    assert parse(flags).keys == shard


def test_keys_that_are_there_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--workers", "1"]) == 0
    assert main([str(tmp_path), "--workers", "1"]) == 1
    assert "File exists" in capsys.readouterr().err


def test_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--workers", "0"])
    assert "1 or more" in capsys.readouterr().err
