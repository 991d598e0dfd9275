"""Loading, saving and sharing of a pycaffe net's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from poseidon.caffe.layers.base import times
from poseidon.caffe.layers.blob import Blob
from poseidon.caffe.net.load import in_order
from poseidon.caffe.snapshot.caffemodel import read_model, write_model
from poseidon.caffe.snapshot.hdf5 import write_model as write_hdf5
from poseidon.errors import UsageError
from poseidon.pycaffe.graph.build import NetGraph

Array = NDArray[np.float32]


def load_weights(net: NetGraph, path: Path, *, own: bool = False) -> None:
    """Load saved weights by layer name.

    Args:
        own: this net has written them, for a state. Layers of one name each get their own blobs.

    Raises:
        SnapshotError: the file cannot be read, or the blobs of a layer have other shapes. The net
            is then unchanged.
    """
    saved = read_model(path)
    for node in net.nodes:
        for blob in node.blobs:
            blob.write_data()  # copies the user's changes first
        node.clear_graph()
    net.compiled.load_blobs(in_order(saved) if own else saved)


def save_weights(net: NetGraph, path: Path, *, hdf5: bool = False, diffs: bool = False) -> None:
    """Write a `.caffemodel`.

    Args:
        hdf5: write a `.caffemodel.h5`.
        diffs: write the gradients, too.

    Raises:
        SnapshotError: the file cannot be written.
    """
    gradients = _arrays(net, diffs=True) if diffs else None
    if hdf5:
        write_hdf5(path, _arrays(net), owned=net.compiled.owned_blobs(), diffs=gradients)
    else:
        write_model(path, net.compiled.definition.param, _arrays(net), diffs=gradients)


def share_weights(net: NetGraph, other: NetGraph) -> None:
    """Let `net` use the memory of `other`'s weights in layers of the same name.

    Raises:
        UsageError: the blobs of a layer differ in number or shape. Nothing is shared then.
    """
    indices = {name: index for index, (name, _) in enumerate(other.compiled.layer_modules)}
    pairs: list[tuple[nn.Parameter, Blob, Blob]] = []
    for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True):
        if name in indices:
            donated = other.nodes[indices[name]].blobs
            _check_shapes(name, node.blobs, donated)
            pairs += zip(layer.sources(), node.blobs, donated, strict=True)
            node.clear_graph()
    for parameter, blob, shared in pairs:
        blob.share_data(shared)
        parameter.data = shared.write_data().view(parameter.shape)


def _check_shapes(layer: str, own: Sequence[Blob], donated: Sequence[Blob]) -> None:
    found, expected = ([blob.shape for blob in blobs] for blobs in (own, donated))
    if found != expected:
        raise UsageError(
            f"layer '{layer}' has blobs of shape {', '.join(map(times, found)) or 'none'}, "
            "expected "
            f"{', '.join(map(times, expected)) or 'none'} as in the net it shares them with"
        )


def _arrays(net: NetGraph, *, diffs: bool = False) -> list[tuple[str, str, list[Array]]]:
    """Return name, type and copies of the blobs, or of their gradients, of every layer."""
    return [
        (
            name,
            layer.param.type,
            [(blob.diff if diffs else blob.data).copy() for blob in node.blobs],
        )
        for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True)
    ]
