"""The key file of a meeting, and the pairs made of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.cluster.rendezvous.key import read_key, server_keys, task_keys, write_new_key
from poseidon.errors import UsageError


def test_a_new_key_serves_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_key(path)
    host, task = server_keys(key), task_keys(key)
    assert host.admit == (task.own.public,) and task.expect == (host.own.public,)
    assert host.own.public != task.own.public
    assert key.decode() not in f"{host}{task}{host.to_json()}{task.to_json()}"
    with pytest.raises(UsageError, match=r"key exists already: use it as it is \(--key_file="):
        write_new_key(path)


def test_another_key_makes_other_pairs() -> None:
    assert server_keys(b"a" * 32).own.public != server_keys(b"b" * 32).own.public


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("k" * 64, 0o644, "others can read"),
        ("k" * 64, 0o640, "others can read"),
        ("short\n", 0o600, "holds 5 bytes; expected 32 to 4096 random bytes"),
        ("k" * 5000, 0o600, "expected 32 to 4096"),
    ],
)
def test_files_that_are_no_key(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        read_key(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="No such file or directory; make one with: poseidon worker --new_key="
    ):
        read_key(tmp_path / "none")


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(
        UsageError, match="key is not a regular file; every task must be able to read it"
    ):
        read_key(tmp_path / "key")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=f"cannot read {tmp_path}: Is a directory; make one with: poseidon worker "
        "--new_key=FILE$",
    ):
        read_key(tmp_path)
