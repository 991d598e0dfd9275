"""OpenCV's dnn module: a reader of Caffe's files that shares no code with this project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
from google.protobuf import text_format
from numpy.typing import NDArray

from poseidon.caffe.proto.caffe_pb2 import NetParameter

Floats = NDArray[np.float32]


def outputs(
    prototxt: Path | NetParameter, model: Path, inputs: Mapping[str, Floats], makers: Sequence[str]
) -> list[Floats]:
    """What OpenCV computes.

    Args:
        prototxt: a net definition with inputs.
        model: its weights.
        inputs: a value for each input.
        makers: the layers whose tops are wanted.
    """
    text = (
        text_format.MessageToString(prototxt).encode()
        if isinstance(prototxt, NetParameter)
        else prototxt.read_bytes()
    )
    net = cv2.dnn.readNetFromCaffe(np.frombuffer(text, np.uint8), np.fromfile(model, np.uint8))
    net.setPreferableBackend(cv2.dnn.DNN_BACKEND_OPENCV)
    # Its faster ways round more coarsely: no joined layers, no Winograd.
    net.enableFusion(False)
    net.enableWinograd(False)
    for name, value in inputs.items():
        net.setInput(value, name)
    return [np.asarray(value, np.float32) for value in net.forward(list(makers))]


def makers(net: NetParameter, blobs: Sequence[str]) -> list[str]:
    """The layer that has the last word about each blob."""
    last = {top: layer.name for layer in net.layer for top in layer.top}
    return [last[blob] for blob in blobs]


def largest_difference(ours: Floats, theirs: Floats) -> float:
    """Of any number, relative to the largest."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
