"""Anchors, relative coordinates, overlaps and suppression, by hand."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.layers.vision.anchors import (
    RATIOS,
    SCALES,
    anchors_of_map,
    base_anchors,
    clip,
    decode,
    encode,
    overlaps,
    suppress,
)


def test_the_nine_anchors_of_faster_rcnn() -> None:
    """The table in the comment of the reference's generate_anchors."""
    expected = [
        [-84, -40, 99, 55], [-176, -88, 191, 103], [-360, -184, 375, 199],
        [-56, -56, 71, 71], [-120, -120, 135, 135], [-248, -248, 263, 263],
        [-36, -80, 51, 95], [-80, -168, 95, 183], [-168, -344, 183, 359],
    ]  # fmt: skip
    assert base_anchors(16, RATIOS, SCALES).tolist() == expected


def test_anchors_of_each_cell() -> None:
    base = torch.tensor([[0.0, 0, 9, 9], [1, 2, 3, 4]])
    found = anchors_of_map(base, 2, 3, 16)
    assert found.shape == (12, 4)
    assert found[3].tolist() == [17, 2, 19, 4]  # row 0, column 1, box 1
    assert found[6].tolist() == [0, 16, 9, 25]  # row 1, column 0, box 0


def test_coordinates_relative_to_an_anchor() -> None:
    anchor = torch.tensor([[0.0, 0, 9, 19]])  # 10 x 20 around (5, 10)
    moved = decode(anchor, torch.tensor([[0.5, -0.25, 0, 0]]))
    assert moved.tolist() == [[5, -5, 15, 15]]  # as in the reference, the far corner is one further
    box = torch.tensor([[3.0, 4, 22, 33]])  # 20 x 30 around (13, 19)
    found = encode(anchor, box)
    assert found[0].tolist() == pytest.approx([0.8, 0.45, 0.6931472, 0.4054651])


def test_clipping() -> None:
    assert clip(torch.tensor([[-3.0, 2, 50, 60]]), 40, 30).tolist() == [[0, 2, 29, 39]]


def test_overlaps() -> None:
    a = torch.tensor([[0.0, 0, 9, 9], [20, 20, 29, 29]])
    b = torch.tensor([[5.0, 0, 14, 9], [0, 0, 9, 9]])
    torch.testing.assert_close(overlaps(a, b), torch.tensor([[50 / 150, 1], [0, 0]]))
    assert overlaps(a, b[:0]).shape == (2, 0)


def test_suppression() -> None:
    boxes = torch.tensor([[0.0, 0, 9, 9], [1, 0, 10, 9], [5, 0, 14, 9], [40, 40, 50, 50]])
    assert suppress(boxes, 0.7, 10).tolist() == [0, 2, 3]
    assert suppress(boxes, 0.3, 10).tolist() == [0, 3]
    assert suppress(boxes, 0.9, 2).tolist() == [0, 1]
    assert suppress(boxes[:0], 0.5, 2).tolist() == []
