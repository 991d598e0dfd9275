"""Keys for a job started by hand: a file for each process, which the shard and its workers can
use.
"""

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
    flags = [
        "--listen",
        "tcp://10.0.0.1:0",
        "--workers",
        "2",
        "--keys",
        str(folder / "shard_1.keys"),
    ]
    assert parse(flags).keys == shard


def test_keys_that_are_there_stay_and_none_are_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "shard_0.keys"
    old.write_text("old")
    assert main([str(tmp_path), "--workers", "1"]) == 1
    sentence = f"make_keys: {old} exists; remove the old keys, or name a different folder\n"
    assert capsys.readouterr().err == sentence
    assert [path.name for path in tmp_path.iterdir()] == ["shard_0.keys"]
    assert old.read_text() == "old"


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "keys"), "--workers", "1"]) == 1
    sentence = f"make_keys: cannot make the folder {tmp_path / 'file' / 'keys'}: Not a directory\n"
    assert capsys.readouterr().err == sentence


def test_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--workers", "0"])
    assert "1 or more" in capsys.readouterr().err


def test_escapes_are_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a\x1b[2J").write_text("")
    assert main([str(tmp_path / "a\x1b[2J" / "keys\n"), "--workers", "1"]) == 1
    assert r"a\x1b[2J/keys\n: Not a directory" in capsys.readouterr().err
