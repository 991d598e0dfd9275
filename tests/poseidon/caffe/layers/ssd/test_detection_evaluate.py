"""DetectionEvaluate: tables of detections and objects with the rows that they give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poseidon.errors import DataError, DefinitionError
from tests.support.nets import build, inputs, layer

LEFT, RIGHT = (0.0, 0.0, 0.4, 1.0), (0.6, 0.0, 1.0, 1.0)
NEAR_LEFT = (0.05, 0.0, 0.4, 1.0)  # overlap 0.875 with LEFT
# image, label, score, box
FOUND = [
    (0, 1, 0.5, *LEFT),
    (0, 1, 0.9, *NEAR_LEFT),
    (0, 1, 0.7, *RIGHT),
    (0, 2, 0.6, *RIGHT),
    (1, 2, 0.8, *RIGHT),
    (2, 1, 0.4, *LEFT),
]
# image, label, instance, box, difficult
OBJECTS = [(0, 1, 0, *LEFT, 0), (0, 2, 0, *RIGHT, 1), (1, 1, 0, *LEFT, 0)]


def rows(
    body: str = "",
    found: list[tuple[float, ...]] = FOUND,
    objects: list[tuple[float, ...]] = OBJECTS,
) -> list[list[float]]:
    body = body if "num_classes" in body else f"num_classes: 3 {body}"
    given = {"found": torch.tensor(found)[None, None], "gt": torch.tensor(objects)[None, None]}
    shapes = {name: tuple(value.shape) for name, value in given.items()}
    text = inputs(**shapes) + layer(
        "DetectionEvaluate", "found gt", "eval", f"detection_evaluate_param {{ {body} }}"
    )
    return [[round(x, 5) for x in row] for row in build(text)(given)["eval"][0, 0].tolist()]


def test_worked_out_by_hand() -> None:
    assert rows() == [
        [-1, 1, 2, -1, -1],
        [-1, 2, 1, -1, -1],
        [0, 1, 0.9, 1, 0],  # the object's best detection
        [0, 1, 0.7, 0, 1],  # no object of this class there
        [0, 1, 0.5, 0, 1],  # the object is taken
        [0, 2, 0.6, 1, 0],
        [1, 2, 0.8, 0, 1],  # no object of this class
        [2, 1, 0.4, 0, 1],  # no object in this image
    ]


def test_difficult_objects_may_be_left_out() -> None:
    found = rows("evaluate_difficult_gt: false")
    assert found[1] == [-1, 2, 0, -1, -1]
    assert found[5] == [0, 2, 0.6, 0, 0]


def test_the_threshold() -> None:
    assert rows("overlap_threshold: 0.9")[2:5] == [
        [0, 1, 0.9, 0, 1],
        [0, 1, 0.7, 0, 1],
        [0, 1, 0.5, 1, 0],
    ]


def test_images_without_detections_or_objects() -> None:
    nothing = rows(found=[(0, -1, -1, -1, -1, -1, -1)], objects=[(-1.0,) * 8])
    assert nothing == [[-1, 1, 0, -1, -1], [-1, 2, 0, -1, -1], [0, -1, -1, 0, 1]]


def test_boxes_may_be_compared_in_pixels(tmp_path: Path) -> None:
    """In pixels the last column counts: of 10 columns, 0 .. 4 and 0.5 .. 4 overlap by 4.5 / 5,
    not by 0.875.
    """
    (tmp_path / "sizes").write_text("a 10 10\nb 10 10\nc 10 10\n")
    body = f'overlap_threshold: 0.89 name_size_file: "{tmp_path}/sizes"'
    assert rows("overlap_threshold: 0.89")[2] == [0, 1, 0.9, 0, 1]
    assert rows(body)[2] == [0, 1, 0.9, 1, 0]
    # Where images were fitted into a square, boxes refer to the part that has the image.
    resized = body + " resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 10 width: 10 }"
    assert rows(resized)[2] == [0, 1, 0.9, 1, 0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("num_classes: 0", "num_classes is 0, expected 1 to 1000000"),
        ("num_classes: 4294967295", "num_classes is 4294967295, expected 1 to 1000000"),
        ("overlap_threshold: 0", "overlap_threshold is 0, expected a positive number"),
    ],
)
def test_refusals(body: str, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        rows(body)


def test_other_bottoms_are_refused() -> None:
    with pytest.raises(DefinitionError, match="bottom 0 has shape 1x1x1x8, expected 1x1xDx7"):
        rows(found=[(0.0,) * 8])
    with pytest.raises(DefinitionError, match="bottom 1 has shape 1x1x1x7, expected 1x1xGx8"):
        rows(objects=[(0.0,) * 7])


def test_the_background_is_no_label() -> None:
    with pytest.raises(DataError, match="a detection has label 1, which is background_label_id"):
        rows("background_label_id: 1", objects=[(0, 2, 0, *LEFT, 0)])
    with pytest.raises(DataError, match="an object has label 1, which is background_label_id"):
        rows("background_label_id: 1")


def test_boxes_in_units_of_a_scale(tmp_path: Path) -> None:
    """FIT_SMALL_SIZE with height_scale and width_scale: boxes are in units of that many pixels,
    here of half the image.
    """
    (tmp_path / "sizes").write_text("a 20 20\n")
    scale = "resize_param { resize_mode: FIT_SMALL_SIZE height: 20 width: 20 height_scale: 10 width_scale: 10 }"
    body = f'overlap_threshold: 0.99 name_size_file: "{tmp_path}/sizes" {scale}'
    outside = (0, 1, 0.5, 0.0, 0.0, 2.0, 1.0)
    assert rows(body, [outside], [(0, 1, 0, 0.0, 0.0, 2.5, 1.0, 0)])[2] == [0, 1, 0.5, 1, 0]
