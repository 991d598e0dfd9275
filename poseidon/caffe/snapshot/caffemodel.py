"""The names of Caffe's snapshot files, and `.caffemodel`: a NetParameter whose layers hold their
blobs.

Law: a written file has what Caffe's Net::ToProto writes, the layers' definitions and blobs, so that
Caffe can read it. All formats that Caffe has written can be read, `.caffemodel.h5` too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from poseidon.base.foreign_files import open_regular, read_definition
from poseidon.base.paths import own_command
from poseidon.caffe.proto.blob import from_array, only_diff, to_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto, NetParameter
from poseidon.caffe.proto.text import strings_are_text
from poseidon.caffe.snapshot import hdf5
from poseidon.caffe.snapshot.hdf5 import NamedBlobs
from poseidon.engine.snapshot_files import check, write_atomically
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
    with open_regular(path) as file:
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


Array = NDArray[np.float32]
LayerBlobs = tuple[str, list[Array | None]]
"""The name and the blobs of a layer; None for a shared blob that the file does not repeat
(HDF5).
"""


_LAYERS = frozenset(
    NetParameter.DESCRIPTOR.fields_by_name[name].number for name in ("layer", "layers")
)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""
_FIXED_LENGTHS = {_FIXED64: 8, _FIXED32: 4}
_WIRE_TYPES = {
    FieldDescriptor.TYPE_STRING: _BYTES,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_MESSAGE: _BYTES,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
}
"""Wire types of fields that are not varints."""


def to_message(
    net: NetParameter, blobs: NamedBlobs, *, diffs: NamedBlobs | None = None
) -> NetParameter:
    """Return a copy of the net with blobs.

    Args:
        net: the definition, filtered for its phase.
        blobs: the blobs of every layer of `net`.
        diffs: the gradients in the same form (snapshot_diff); None: no gradients.
    """
    message = deepcopy(net)
    for layer, (_, _, arrays) in zip(message.layer, blobs, strict=True):
        del layer.blobs[:]
        layer.blobs.extend(from_array(array) for array in arrays)
    for layer, (_, _, arrays) in zip(message.layer, diffs or (), strict=diffs is not None):
        for blob, array in zip(layer.blobs, arrays, strict=True):
            blob.MergeFrom(only_diff(array))
    return message


def write_model(
    path: Path, net: NetParameter, blobs: NamedBlobs, *, diffs: NamedBlobs | None = None
) -> None:
    """Write a model atomically.

    Raises:
        SnapshotError: the file cannot be written.
    """
    write_atomically(path, to_message(net, blobs, diffs=diffs).SerializeToString())


def state_beside(model: Path) -> Path:
    """Return the path that the state has, if the model is of a snapshot."""
    prefix, _, form = model.name.partition(".caffemodel")
    return model.with_name(f"{prefix}.solverstate{form}")


def read_model(path: Path, *, is_checked: bool = False) -> list[LayerBlobs]:
    """Read the name and the blobs of each layer, from a model of any format (V0, V1, current,
    HDF5).

    Args:
        is_checked: the checksums of its snapshot were verified.

    Raises:
        SnapshotError: the file is missing, truncated or not a model, it does not match the checksum
            of its snapshot, or the size of a blob does not match its shape.
    """
    if not is_checked:
        check(state_beside(path), path.name)
    if hdf5.is_hdf5(path):
        return hdf5.read_model(path)
    found = blobs_of(read_message(path, NetParameter(), "model"), path)
    if not found:
        raise _without_layers(path)
    return found


def blobs_of(net: NetParameter, source: str | Path) -> list[LayerBlobs]:
    """Return the name and the blobs of each layer of a model of any format.

    Args:
        source: its file, or another name for it, for errors.

    Raises:
        SnapshotError: the size of a blob does not match its shape.
    """
    found: list[tuple[str, Sequence[BlobProto]]] = [
        (layer.name, layer.blobs) for layer in net.layer
    ]
    for old in net.layers:
        if old.HasField("layer"):  # V0: the layer is one level deeper
            found.append((old.layer.name, old.layer.blobs))
        else:
            found.append((old.name, old.blobs))
    return [(name, _arrays(source, name, blobs)) for name, blobs in found]


def check_model(path: Path) -> None:
    """Check that a file is a model by its outermost fields, without reading blobs.

    Raises:
        SnapshotError: the file is missing, truncated or not a model. The messages are as in
            `read_model`.
    """
    try:
        open_regular(path).close()
    except OSError as error:
        raise SnapshotError(f"cannot read the model {path}: {error.strerror}") from error
    if hdf5.is_hdf5(path):
        hdf5.check_model(path)
        return
    fields = {field.number: field for field in NetParameter.DESCRIPTOR.fields}
    layers = 0
    size = path.stat().st_size
    with open_regular(path) as file:
        while file.tell() < size:
            tag = _varint(file)
            number, wire_type = tag >> 3, tag & 7
            if (
                not number
                or not _skip(file, wire_type, size)
                or not _fits(fields.get(number), wire_type)
            ):
                raise unparsable(path, "model")
            layers += number in _LAYERS
    if not layers:
        raise _without_layers(path)


def _without_layers(path: Path) -> SnapshotError:
    """Return the error for a file without layers.

    A file of 0 bytes is a legal empty message for protobuf.
    """
    if path.stat().st_size:
        return SnapshotError(f"{path} is not a model: it has no layers")
    return SnapshotError(
        f"{path} is not a model: it has 0 bytes. Caffe takes such a file for a model without "
        "layers and silently keeps the initial weights; leave the file out if that is wanted"
    )


def _fits(field: Any, wire_type: int) -> bool:
    """Return whether a field can have this wire type. Repeated numbers can be packed or not."""
    if field is None:
        return True
    expected = _WIRE_TYPES.get(field.type, _VARINT)
    return wire_type == expected or (field.is_repeated and wire_type == _BYTES)


def _skip(file: BinaryIO, wire_type: int, size: int) -> bool:
    """Skip the value of a field. Return whether it is complete."""
    if wire_type == _VARINT:
        return _varint(file) >= 0
    length = _varint(file) if wire_type == _BYTES else _FIXED_LENGTHS.get(wire_type, -1)
    if not 0 <= length <= size - file.tell():
        return False
    file.seek(length, os.SEEK_CUR)
    return True


def _varint(file: BinaryIO) -> int:
    """Read a protobuf varint. Return -1 if it is incomplete."""
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return -1
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return -1


def _arrays(source: str | Path, layer: str, blobs: Sequence[BlobProto]) -> list[Array | None]:
    try:
        return [to_array(blob) for blob in blobs]
    except ValueError as error:
        raise SnapshotError(f"{source}: layer '{layer}': {error}") from error
