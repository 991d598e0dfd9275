"""The boxes of a DetectionOutput layer in pixels of the original image."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from poseidon.caffe.data.augmentation import Resize
from poseidon.caffe.data.boxes import Box
from poseidon.caffe.layers.saved_results import ImageSize, SavedDetection, original_box
from poseidon.caffe.proto.caffe_pb2 import DetectionOutputParameter, ResizeParameter

SIZE = ImageSize("a", 100, 200)


@pytest.mark.parametrize(
    ("resize", "expected"),
    [
        ("", (20, 0, 100, 60)),
        ("resize_mode: WARP", (20, 0, 100, 60)),
        # The image takes the rows from 0.25 to 0.75 of the input.
        ("resize_mode: FIT_LARGE_SIZE_AND_PAD", (20, 0, 100, 70)),
        ("resize_mode: FIT_SMALL_SIZE", (20, 0, 100, 60)),
        # The output is in units of 30 x 40 pixels.
        ("resize_mode: FIT_SMALL_SIZE height_scale: 30 width_scale: 40", (4, 0, 20, 18)),
    ],
)
def test_boxes_of_the_original_image(resize: str, expected: tuple[float, ...]) -> None:
    text = f"save_output_param {{ resize_param {{ height: 300 width: 300 {resize} }} }}"
    param = text_format.Parse(text, DetectionOutputParameter()).save_output_param.resize_param
    assert isinstance(param, ResizeParameter)
    made = Resize(param) if resize else None
    box = Box(0.1, -0.1, 0.5, 0.6)
    assert original_box(box, SIZE, made) == pytest.approx(expected)


def test_corners_are_whole_pixels_of_position_and_size() -> None:
    assert SavedDetection("a", 1, 0.5, 1.9, 2.0, 3.9, 4.0).corners == (1, 2, 4, 6)
