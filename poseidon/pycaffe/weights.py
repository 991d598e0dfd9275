"""Weights of a net that keeps its blobs: from a file, to a file, and one memory for two nets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from poseidon.errors import UsageError
from poseidon.layers.base import times
from poseidon.layers.blob import Blob
from poseidon.pycaffe.build import Built
from poseidon.snapshot.caffemodel import read_model, write_model
from poseidon.snapshot.hdf5 import write_model as write_hdf5

Array = NDArray[np.float32]


def load_weights(net: Built, path: Path) -> None:
    """Take over saved weights by layer name.

    Raises:
        SnapshotError: the file cannot be read, or a layer's blobs have other shapes; the net is then unchanged.
    """
    saved = read_model(path)
    for node in net.nodes:
        for blob in node.blobs:
            blob.write_data()  # what the user wrote on the host goes first
        node.forget()
    net.compiled.load_blobs(saved)


def save_weights(net: Built, path: Path, *, hdf5: bool = False, diffs: bool = False) -> None:
    """Write a `.caffemodel`.

    Args:
        net: the net.
        path: the file.
        hdf5: write a `.caffemodel.h5`.
        diffs: the gradients too.

    Raises:
        SnapshotError: it cannot be written.
    """
    gradients = _arrays(net, diffs=True) if diffs else None
    if hdf5:
        write_hdf5(path, _arrays(net), owned=net.compiled.owned_blobs(), diffs=gradients)
    else:
        write_model(path, net.compiled.definition.param, _arrays(net), diffs=gradients)


def share_weights(net: Built, other: Built) -> None:
    """Let `net` use the memory of `other`'s weights, layer by layer where names are equal.

    Raises:
        UsageError: blobs of a layer differ in number or shape; nothing is shared then.
    """
    theirs = {name: place for place, (name, _) in enumerate(other.compiled.layer_modules)}
    pairs: list[tuple[nn.Parameter, Blob, Blob]] = []
    for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True):
        if name in theirs:
            donated = other.nodes[theirs[name]].blobs
            _check_shapes(name, node.blobs, donated)
            pairs += zip(layer.sources(), node.blobs, donated, strict=True)
            node.forget()
    for parameter, blob, given in pairs:
        blob.share_data(given)
        parameter.data = given.write_data().view(parameter.shape)


def _check_shapes(layer: str, mine: Sequence[Blob], theirs: Sequence[Blob]) -> None:
    found, expected = ([blob.shape for blob in blobs] for blobs in (mine, theirs))
    if found != expected:
        raise UsageError(
            f"layer '{layer}' has blobs of shape {', '.join(map(times, found)) or 'none'}, expected "
            f"{', '.join(map(times, expected)) or 'none'} as in the net it shares them with"
        )


def _arrays(net: Built, *, diffs: bool = False) -> list[tuple[str, str, list[Array]]]:
    """Name, type and copies of the blobs, or of their gradients, of every layer."""
    return [
        (name, layer.param.type, [(blob.diff if diffs else blob.data).copy() for blob in node.blobs])
        for node, (name, layer) in zip(net.nodes, net.compiled.layer_modules, strict=True)
    ]
