"""Names of snapshot files, and writing them so that a reader sees all of a file or none of it."""

from __future__ import annotations

import glob
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from poseidon.durable import put_in_place
from poseidon.errors import SnapshotError
from poseidon.proto.text import strings_are_text

M = TypeVar("M", bound=Message)


def model_path(prefix: Path, iteration: int, *, hdf5: bool = False) -> Path:
    """`<prefix>_iter_<N>.caffemodel`, with `.h5` behind it for HDF5."""
    return prefix.with_name(f"{prefix.name}_iter_{iteration}.caffemodel{'.h5' if hdf5 else ''}")


def state_path(prefix: Path, iteration: int, *, hdf5: bool = False) -> Path:
    """`<prefix>_iter_<N>.solverstate`, with `.h5` behind it for HDF5."""
    return prefix.with_name(f"{prefix.name}_iter_{iteration}.solverstate{'.h5' if hdf5 else ''}")


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises:
        SnapshotError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot make the folder {folder}: {error.strerror}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name beside it, flush it to disk, and rename it, on disk as well.

    Raises:
        SnapshotError: the folder is missing or not writable, or the disk is full; an earlier file of that name
            is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        with partial.open("wb") as file:
            file.write(content)
        put_in_place(partial, path)
    except OSError as error:
        with suppress(OSError):  # a file system that is read-only says so even of what is not there
            partial.unlink(missing_ok=True)
        raise SnapshotError(f"cannot write {path}: {error.strerror}") from error


def require_readable(path: Path, kind: str) -> None:
    """Check that a file can be opened.

    Raises:
        SnapshotError: it cannot; the sentence is that of `read_message`.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise SnapshotError(f"cannot read the {kind} {path}: {error.strerror}") from error


def read_message(path: Path, message: M, kind: str) -> M:
    """Read a binary protobuf file.

    Args:
        path: the file.
        message: is filled and returned.
        kind: what the file should be, for errors: "model".

    Raises:
        SnapshotError: the file is missing, or is not what it should be.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read the {kind} {path}: {error.strerror}") from error
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise SnapshotError(
            f"{path} is not a {kind}, or it is cut short: {len(content)} bytes that do not parse as one"
        ) from error
    if not strings_are_text(message):
        raise SnapshotError(f"{path} is damaged: a name in it is no UTF-8 text")
    return message
