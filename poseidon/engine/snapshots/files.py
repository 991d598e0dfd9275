"""Folders and files of snapshots, written as a whole."""

from __future__ import annotations

from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.errors import SnapshotError


def make_folder(folder: Path) -> None:
    """Create a folder and its parents unless it exists.

    Raises:
        SnapshotError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot create the folder {folder}: {error.strerror}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that readers never see a part of; see `poseidon.base.durable`.

    Raises:
        SnapshotError: the folder is missing or not writable, or the disk is full. An existing file
            of that name is unchanged.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error
