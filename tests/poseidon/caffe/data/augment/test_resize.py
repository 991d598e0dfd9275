"""Resizing: sizes, paddings and boxes of each mode."""

from __future__ import annotations

from random import Random

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from poseidon.caffe.data.augment.boxes import WHOLE, Box
from poseidon.caffe.data.augment.resize import Resize
from poseidon.caffe.proto.caffe_pb2 import ResizeParameter
from poseidon.errors import DataError

WIDE = np.random.default_rng(1).integers(0, 256, (30, 60, 3), np.uint8)
TALL = np.ascontiguousarray(WIDE.transpose(1, 0, 2))


def resize(text: str) -> Resize:
    return Resize(text_format.Parse(text, ResizeParameter()))


@pytest.mark.parametrize(
    ("mode", "wide", "tall"),
    [
        ("WARP", (20, 24), (20, 24)),
        ("FIT_SMALL_SIZE", (20, 40), (48, 24)),
        ("FIT_LARGE_SIZE_AND_PAD", (20, 24), (20, 24)),
    ],
)
def test_sizes(mode: str, wide: tuple[int, int], tall: tuple[int, int]) -> None:
    made = resize(f"height: 20 width: 24 resize_mode: {mode}")
    for image, expected in ((WIDE, wide), (TALL, tall)):
        assert made.size(*image.shape[:2]) == expected
        assert made(image, Random(1)).shape == (*expected, 3)
        assert made(image[..., 0], Random(1)).shape == expected


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("LINEAR", cv2.INTER_LINEAR),
        ("AREA", cv2.INTER_AREA),
        ("NEAREST", cv2.INTER_NEAREST),
        ("CUBIC", cv2.INTER_CUBIC),
        ("LANCZOS4", cv2.INTER_LANCZOS4),
    ],
)
def test_the_interpolations_are_opencvs(name: str, flag: int) -> None:
    made = resize(f"height: 20 width: 24 interp_mode: {name}")(WIDE, Random(1))
    assert np.array_equal(made, cv2.resize(WIDE, (24, 20), interpolation=flag))


def test_one_of_several_interpolations_is_drawn() -> None:
    made = resize("height: 20 width: 24 interp_mode: NEAREST interp_mode: CUBIC")
    choices = [
        cv2.resize(WIDE, (24, 20), interpolation=flag)
        for flag in (cv2.INTER_NEAREST, cv2.INTER_CUBIC)
    ]
    drawn = [
        next(
            n
            for n, choice in enumerate(choices)
            if np.array_equal(choice, made(WIDE, Random(seed)))
        )
        for seed in range(20)
    ]
    assert set(drawn) == {0, 1}


@pytest.mark.parametrize(
    ("pad", "row"),
    [
        ("pad_value: 7", [7, 7, 7]),
        ("pad_value: 1 pad_value: 2 pad_value: 3", [1, 2, 3]),
        ("", [0, 0, 0]),
        ("pad_mode: REPEAT_NEAREST", None),
        ("pad_mode: MIRRORED", None),
    ],
)
def test_a_fitted_image_is_padded_on_both_sides(pad: str, row: list[int] | None) -> None:
    made = resize(f"height: 21 width: 24 resize_mode: FIT_LARGE_SIZE_AND_PAD {pad}")(
        WIDE, Random(1)
    )
    inside = cv2.resize(WIDE, (24, 12))
    assert np.array_equal(made[4:16], inside)  # 9 rows to pad: 4 above, 5 below
    if row is not None:
        assert (made[:4] == row).all() and (made[16:] == row).all()
    else:
        source = inside[:1] if "REPEAT" in pad else inside[4:0:-1]
        assert (made[:4] == source).all()


def test_boxes_move_with_the_image() -> None:
    box = Box(0.1, 0.2, 0.5, 0.6)
    for mode in ("WARP", "FIT_SMALL_SIZE"):
        assert resize(f"height: 20 width: 20 resize_mode: {mode}").moved(
            box, 30, 60
        ) == pytest.approx(box)
    fitted = resize("height: 20 width: 20 resize_mode: FIT_LARGE_SIZE_AND_PAD")
    # The image takes the rows from 5 to 15 of 20.
    assert fitted.moved(box, 30, 60) == pytest.approx((0.1, 0.25 + 0.1, 0.5, 0.25 + 0.3))
    assert fitted.moved(box, 60, 30) == pytest.approx((0.25 + 0.05, 0.2, 0.25 + 0.25, 0.6))


def test_a_crop_is_extrapolated_to_the_scale() -> None:
    made = resize(
        "height: 20 width: 20 resize_mode: FIT_SMALL_SIZE height_scale: 10 width_scale: 20"
    )
    # 30 x 60 becomes 20 x 40.
    assert made.extrapolated(Box(0.1, 0.2, 0.3, 0.4), 30, 60, WHOLE) == pytest.approx(
        (0.2, 0.4, 0.6, 0.8)
    )
    with pytest.raises(DataError, match="smaller than height_scale 10 x width_scale 20"):
        made.extrapolated(WHOLE, 30, 60, Box(0, 0, 0.1, 0.1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("height: 20", "height 20 and width 0, expected 1 to 32767"),
        ("height: 20 width: 40000", "expected 1 to 32767"),
        ("height: 20 width: 20 pad_value: inf", "pad_value inf, expected a finite number"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resize(text)


def test_values_of_other_channels_are_refused() -> None:
    with pytest.raises(DataError, match="2 values of pad_value, but the images have 3 channels"):
        resize("height: 2 width: 2 pad_value: 1 pad_value: 2").check_channels(3)


def test_a_long_image_is_refused() -> None:
    with pytest.raises(DataError, match="would be resized to 200 x 80000"):
        resize("height: 200 width: 200 resize_mode: FIT_SMALL_SIZE").size(1, 400)
