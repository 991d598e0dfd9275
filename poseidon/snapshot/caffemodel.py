"""`.caffemodel`: a NetParameter whose layers carry their blobs; reading also takes `.caffemodel.h5`.

Law: what is written is what Caffe's Net::ToProto writes, the layer's definition and its blobs, so Caffe reads it;
what is read is any grammar that Caffe ever wrote, by layer name.
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
"""A layer's name and blobs; None for one that the file leaves to the layer that shares it (HDF5)."""


NamedBlobs = Iterable[tuple[str, str, Sequence[Array]]]
"""Layer name, layer type and arrays of every layer, in order."""


def to_message(net: NetParameter, blobs: NamedBlobs, *, diffs: NamedBlobs | None = None) -> NetParameter:
    """Return the net with its blobs.

    Args:
        net: the definition, filtered for its phase.
        blobs: of every layer of `net`.
        diffs: in the same form (snapshot_diff); None: none.
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
    """Write a model, atomically.

    Raises:
        SnapshotError: it cannot be written.
    """
    write_atomically(path, to_message(net, blobs, diffs=diffs).SerializeToString())


def read_model(path: Path) -> list[LayerBlobs]:
    """Return each layer's name and blobs, of a model of any grammar (V0, V1, today's) or in HDF5.

    Raises:
        SnapshotError: the file is missing, cut short, no model, or has a blob whose sizes disagree.
    """
    if hdf5.is_hdf5(path):
        return hdf5.read_model(path)
    net = read_message(path, NetParameter(), "model")
    found: list[tuple[str, Sequence[BlobProto]]] = [(layer.name, layer.blobs) for layer in net.layer]
    for old in net.layers:
        if old.HasField("layer"):  # V0: the layer proper is one level down
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
