"""`.caffemodel`: a NetParameter whose layers hold their blobs.

Law: a written file has what Caffe's Net::ToProto writes, the layers' definitions and blobs, so that Caffe can read it. All
formats that Caffe has written can be read, `.caffemodel.h5` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import SnapshotError
from poseidon.proto.blob import from_array, only_diff, to_array
from poseidon.proto.caffe_pb2 import BlobProto, NetParameter
from poseidon.snapshot import hdf5
from poseidon.snapshot.files import read_message, write_atomically

Array = NDArray[np.float32]
LayerBlobs = tuple[str, list[Array | None]]
"""The name and the blobs of a layer; None for a shared blob that the file does not repeat (HDF5)."""


NamedBlobs = Iterable[tuple[str, str, Sequence[Array]]]
"""The name, the type and the blobs of every layer, in order."""


def to_message(net: NetParameter, blobs: NamedBlobs, *, diffs: NamedBlobs | None = None) -> NetParameter:
    """Return a copy of the net with blobs.

    Args:
        net: the definition, filtered for its phase.
        blobs: the blobs of every layer of `net`.
        diffs: the gradients in the same form (snapshot_diff); None: no gradients.
    """
    message = NetParameter()
    message.CopyFrom(net)
    for layer, (_, _, arrays) in zip(message.layer, blobs, strict=True):
        del layer.blobs[:]
        layer.blobs.extend(from_array(array) for array in arrays)
    for layer, (_, _, arrays) in zip(message.layer, diffs or (), strict=diffs is not None):
        for blob, array in zip(layer.blobs, arrays, strict=True):
            blob.MergeFrom(only_diff(array))
    return message


def write_model(path: Path, net: NetParameter, blobs: NamedBlobs, *, diffs: NamedBlobs | None = None) -> None:
    """Write a model atomically.

    Raises:
        SnapshotError: the file cannot be written.
    """
    write_atomically(path, to_message(net, blobs, diffs=diffs).SerializeToString())


def read_model(path: Path) -> list[LayerBlobs]:
    """Read the name and the blobs of each layer, from a model of any format (V0, V1, current, HDF5).

    Raises:
        SnapshotError: the file is missing, truncated or not a model, or the size of a blob does not match its shape.
    """
    if hdf5.is_hdf5(path):
        return hdf5.read_model(path)
    net = read_message(path, NetParameter(), "model")
    found: list[tuple[str, Sequence[BlobProto]]] = [(layer.name, layer.blobs) for layer in net.layer]
    for old in net.layers:
        if old.HasField("layer"):  # V0: the layer is one level deeper
            found.append((old.layer.name, old.layer.blobs))
        else:
            found.append((old.name, old.blobs))
    if not found:
        raise SnapshotError(f"{path} is not a model: it has no layers")
    return [(name, _arrays(path, name, blobs)) for name, blobs in found]


def _arrays(path: Path, layer: str, blobs: Sequence[BlobProto]) -> list[Array | None]:
    try:
        return [to_array(blob) for blob in blobs]
    except ValueError as error:
        raise SnapshotError(f"{path}: layer '{layer}': {error}") from error
