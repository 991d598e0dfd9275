"""Snapshot files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poseidon.engine.snapshots.files import make_folder, write_atomically
from poseidon.errors import SnapshotError


def test_a_write_that_fails_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    write_atomically(path, b"first")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SnapshotError, match=r"cannot write .*model: No space left on device"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_read_only_file_system_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even removing what is not there is refused."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr("os.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SnapshotError, match=r"cannot write .*model: Read-only file system"):
        write_atomically(tmp_path / "model", b"x")


def test_the_new_name_is_brought_to_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a crash of the machine could undo the renaming after older snapshots were removed."""
    path, named = tmp_path / "model", list[bool]()

    def fsync(number: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{number}")) == tmp_path:
            named.append(path.exists())

    monkeypatch.setattr("os.fsync", fsync)
    write_atomically(path, b"whole")
    assert named == [True]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file or directory"):
        write_atomically(tmp_path / "no" / "model", b"")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"cannot create the folder .*file"):
        make_folder(tmp_path / "file" / "b")
