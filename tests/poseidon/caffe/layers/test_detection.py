"""Permute, and PriorBox against boxes worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from poseidon.caffe.layers.detection import (
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
from poseidon.caffe.net.net import Net
from tests.support.nets import build, inputs, layer, noise, stack


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


MAPS = {"f": (1, 4, 2, 3), "i": (1, 3, 20, 30)}


def priors(body: str) -> Net:
    return build(inputs(**MAPS) + layer("PriorBox", "f i", "y", f"prior_box_param {{ {body} }}"))


def boxes(body: str) -> torch.Tensor:
    """Cells x boxes x 4, in pixels of the 30 x 20 picture."""
    top = priors(body)({"f": noise(*MAPS["f"]), "i": noise(*MAPS["i"])})["y"]
    return top[0, 0].view(6, -1, 4) * torch.tensor([30.0, 20, 30, 20])


def test_permute() -> None:
    net = build(stack("Permute x=2,3,4,5 > y | permute_param { order: 0 order: 2 order: 3 }"))
    x = noise(2, 3, 4, 5)
    assert torch.equal(net({"x": x})["y"], x.permute(0, 2, 3, 1))


def test_squares_sit_on_the_centres_of_cells() -> None:
    found = boxes("min_size: 4")
    assert found.shape == (6, 1, 4)
    assert found[0, 0].tolist() == pytest.approx([3, 3, 7, 7])
    assert found[5, 0].tolist() == pytest.approx([23, 13, 27, 17])


def test_sizes_and_shapes_in_order() -> None:
    found = boxes(
        "min_size: 4 min_size: 6 max_size: 9 max_size: 24 aspect_ratio: 2 aspect_ratio: 2 "
        "aspect_ratio: 1"
    )
    sides = [(float(x2 - x1), float(y2 - y1)) for x1, y1, x2, y2 in found[0]]
    two = math.sqrt(2)
    expected = [(4, 4), (6, 6), (4 * two, 4 / two), (4 / two, 4 * two)]
    expected += [(6, 6), (12, 12), (6 * two, 6 / two), (6 / two, 6 * two)]
    assert [side for pair in sides for side in pair] == pytest.approx(
        [s for pair in expected for s in pair]
    )


def test_steps_offsets_and_clipping() -> None:
    plain = boxes("min_size: 4 step: 5 offset: 0")
    assert plain[1, 0].tolist() == pytest.approx([3, -2, 7, 2])
    assert boxes("min_size: 4 step: 5 offset: 0 clip: true")[1, 0].tolist() == pytest.approx(
        [3, 0, 7, 2]
    )


def test_the_size_of_the_picture_may_be_given() -> None:
    plain = boxes("min_size: 4 img_h: 20 img_w: 30")
    assert torch.equal(plain, boxes("min_size: 4"))
    # Of a picture of 60 x 60 the boxes take a part half, or a third, as large; cells lie further
    # apart.
    assert boxes("min_size: 4 img_size: 60")[0, 0].tolist() == pytest.approx([4, 13 / 3, 6, 17 / 3])


def test_without_flip_there_are_no_inverse_aspect_ratios() -> None:
    assert boxes("min_size: 4 aspect_ratio: 2 flip: false").shape == (6, 2, 4)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", [0.1] * 4),
        ("variance: 0.5", [0.5] * 4),
        ("variance: 0.1 variance: 0.2 variance: 0.3 variance: 0.4", [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_variances(body: str, expected: list[float]) -> None:
    top = priors(f"min_size: 4 {body}")({"f": noise(*MAPS["f"]), "i": noise(*MAPS["i"])})["y"]
    assert top[0, 1].view(-1, 4).tolist() == [pytest.approx(expected)] * 6
