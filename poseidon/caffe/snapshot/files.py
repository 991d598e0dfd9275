"""The names of Caffe's snapshot files, and reading of protobuf files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from poseidon.base.foreign_files import read_definition
from poseidon.base.hints import own_command
from poseidon.caffe.proto.text import strings_are_text
from poseidon.errors import SnapshotError

M = TypeVar("M", bound=Message)
LARGEST_MESSAGE = 2 << 30
"""In bytes: protobuf parses no larger one."""


def model_path(prefix: Path, iteration: int, *, hdf5: bool = False) -> Path:
    """Return `<prefix>_iter_<N>.caffemodel`, with the suffix `.h5` for HDF5."""
    return prefix.with_name(f"{prefix.name}_iter_{iteration}.caffemodel{'.h5' if hdf5 else ''}")


def state_path(prefix: Path, iteration: int, *, hdf5: bool = False) -> Path:
    """Return `<prefix>_iter_<N>.solverstate`, with the suffix `.h5` for HDF5."""
    return prefix.with_name(f"{prefix.name}_iter_{iteration}.solverstate{'.h5' if hdf5 else ''}")


def unparsable(path: Path, kind: str) -> SnapshotError:
    """Return the error for a file that is not a binary protobuf file of this kind.

    Args:
        path: a file that can be read.
        kind: the expected kind of file, such as "model".
    """
    with path.open("rb") as file:
        begin, size = file.read(64), path.stat().st_size
    if path.name.endswith((".solverstate", ".solverstate.h5")) and kind == "model":
        return SnapshotError(
            f"{path} is not a model: it is a solver state, from which --snapshot resumes"
        )
    if begin and begin.isascii() and "".join(begin.decode().split()).isprintable():
        return SnapshotError(f"{path} is not a {kind}: it is text, as a definition (prototxt) is")
    if kind == "model" and path.suffix.lower() in (".pth", ".pt", ".safetensors"):
        return SnapshotError(
            f"{path} is not a {kind}: it is named like a file of tensors; `{own_command()} import` makes "
            "a .caffemodel of it"
        )
    return SnapshotError(
        f"{path} is not a {kind}, or it is truncated: its {size} bytes cannot be parsed"
    )


def read_message(path: Path, message: M, kind: str) -> M:
    """Read a binary protobuf file.

    Args:
        path: the file.
        message: the message to parse into, which is returned.
        kind: the expected kind of file for errors, such as "model".

    Raises:
        SnapshotError: the file is missing or not of this kind.
    """
    try:
        content = read_definition(path, most_bytes=LARGEST_MESSAGE)
    except OSError as error:
        raise SnapshotError(f"cannot read the {kind} {path}: {error.strerror}") from error
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise unparsable(path, kind) from error
    if not strings_are_text(message):
        raise SnapshotError(f"{path} is damaged: a name in it is not UTF-8 text")
    return message
