"""Scores of pictures are those of a data layer of the phase TEST; test_deploy.py has the commands."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from poseidon.caffe.net.net import Net
from poseidon.caffe.proto.caffe_pb2 import TEST
from poseidon.caffe.tools.classification import PictureScores
from poseidon.caffe.tools.solo import NetRequest, open_net


def flattened(folder: Path, channels: int) -> Net:
    """Return a net whose output is its input, with room for two pictures."""
    path = folder / "net.prototxt"
    path.write_text(
        'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: '
        f"{channels} dim: 4 dim: 6 }} }} }}\n"
        'layer { name: "out" type: "Flatten" bottom: "data" top: "out" }',
        encoding="utf-8",
    )
    return open_net(NetRequest(model=path, phase=TEST))


@pytest.mark.parametrize("rgb", [False, True])
def test_a_picture_in_color(tmp_path: Path, rgb: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    net = flattened(tmp_path, 3)
    scores = PictureScores(net, mean=(1.0, 2.0, 3.0), scale=0.5, size=(8, 10), rgb=rgb)
    found = scores.of(tmp_path / "a.png")
    expected = pixels[2:6, 2:8, :: -1 if rgb else 1].transpose(2, 0, 1).astype(np.float32)
    expected = (expected - np.array([1, 2, 3], np.float32).reshape(3, 1, 1)) * np.float32(0.5)
    np.testing.assert_array_equal(found, expected.ravel())


def test_a_picture_for_a_net_of_grey_ones(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), pixels)
    found = PictureScores(flattened(tmp_path, 1)).of(tmp_path / "a.png")
    np.testing.assert_array_equal(found, pixels.ravel().astype(np.float32))
