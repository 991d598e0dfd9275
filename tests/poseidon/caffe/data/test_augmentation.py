"""The steps together: expansion, and boxes that stay on their objects."""

from __future__ import annotations

from pathlib import Path
from random import Random

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

from poseidon.caffe.data.augmentation import Augmentation, Resize
from poseidon.caffe.data.batches.transform import (
    LANES,
    SEED_LANES,
    Transform,
    generator,
    pixels_of,
    planes,
)
from poseidon.caffe.data.boxes import WHOLE, Box, Object
from poseidon.caffe.proto.caffe_pb2 import ResizeParameter, TransformationParameter
from poseidon.errors import DataError

HIGH, WIDE = 40, 60
# A white object in a gray image.
TOP, LEFT, BOTTOM, RIGHT = 10, 12, 26, 42
IMAGE = np.full((HIGH, WIDE, 3), 60, np.uint8)
IMAGE[TOP:BOTTOM, LEFT:RIGHT] = 250
OBJECT = Object(3, 0, Box(LEFT / WIDE, TOP / HIGH, RIGHT / WIDE, BOTTOM / HIGH), True)


def param(text: str) -> TransformationParameter:
    return text_format.Parse(text, TransformationParameter())


def transform(text: str, *, train: bool = True) -> Transform:
    return Transform(param(text), train=train, resolve=Path)


def bounds(image: np.ndarray) -> tuple[float, ...]:  # type: ignore[type-arg]
    """Where the white object is, in fractions of the image (H, W)."""
    rows, columns = np.flatnonzero((image > 200).any(1)), np.flatnonzero((image > 200).any(0))
    high, wide = image.shape
    return (columns[0] / wide, rows[0] / high, (columns[-1] + 1) / wide, (rows[-1] + 1) / high)


def test_an_expanded_image_has_the_mean_around_it() -> None:
    made = Augmentation(
        param("expand_param { max_expand_ratio: 4 } mean_value: 10 mean_value: 20 mean_value: 30")
    )
    sizes = set()
    for seed in range(20):
        image, (item,) = made.before(IMAGE, [OBJECT], Random(seed))
        sizes.add(image.shape)
        assert (image[0, 0] == [10, 20, 30]).all() or (image[-1, -1] == [10, 20, 30]).all()
        assert item.box == pytest.approx(bounds(image[..., 0]))
        assert (item.label, item.difficult) == (3, True)
    assert len(sizes) > 15


def test_an_expansion_may_be_rare() -> None:
    made = Augmentation(param("expand_param { prob: 0.3 max_expand_ratio: 4 }"))
    same = sum(made.before(IMAGE, [], Random(seed))[0] is IMAGE for seed in range(200))
    assert 110 < same < 170


ALL = (
    "distort_param { brightness_prob: 0.5 brightness_delta: 3 } expand_param { max_expand_ratio: "
    "2 } "
    "noise_param { jpeg: 95 } mirror: true mean_value: 60 scale: 0.5 "
)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "resize_param { height: 80 width: 90 }",
        "resize_param { height: 80 width: 90 resize_mode: FIT_LARGE_SIZE_AND_PAD pad_value: 60 }",
        "resize_param { height: 80 width: 90 resize_mode: FIT_LARGE_SIZE_AND_PAD pad_mode: "
        "REPEAT_NEAREST } crop_size: 70",
        "resize_param { height: 80 width: 100 resize_mode: FIT_SMALL_SIZE } crop_h: 75 crop_w: 95",
    ],
)
def test_boxes_stay_on_their_objects(text: str, *, train: bool) -> None:
    made = transform(ALL + text, train=train)
    augmentation = made.augmentation
    assert augmentation is not None
    draws = made.draws(5, np.arange(12))
    assert draws.shape == (12, LANES + SEED_LANES)
    for choice in draws:
        random = generator(choice)
        before, objects = augmentation.before(IMAGE, [OBJECT], random)
        after = augmentation.after(before, random)
        shape = made.output_shape(planes(before).shape)
        out = np.empty(shape, np.float32)
        placement = made.place(planes(after), choice, out)
        (item,) = augmentation.placed(
            objects, before.shape[:2], placement.window, mirrored=placement.mirrored
        )
        assert item.box == pytest.approx(bounds(out[0] * 2 + 60), abs=0.03)
        # The same in one step, as the data layers of labelled images do it.
        again = np.empty(shape, np.float32)
        if shape == made.output_shape(planes(IMAGE).shape):
            made.one(planes(IMAGE), choice, again)
            assert np.array_equal(again, out)


def test_a_mean_file_has_the_size_of_the_resized_image() -> None:
    assert transform("resize_param { height: 8 width: 9 } crop_size: 5").output_shape(
        (3, 40, 60)
    ) == (3, 5, 5)
    assert transform("resize_param { height: 8 width: 9 }").output_shape((1, 40, 60)) == (1, 8, 9)


def test_gray_images() -> None:
    made = transform("resize_param { height: 8 width: 9 } noise_param { hist_eq: true }")
    out = np.empty((1, 8, 9), np.float32)
    made.one(IMAGE[None, ..., 0], made.draws(1, np.arange(1))[0], out)
    assert pixels_of(planes(IMAGE[..., 0])).shape == (HIGH, WIDE)
    assert out.max() > 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expand_param { }", "max_expand_ratio 1, expected more than 1 and at most 16"),
        ("expand_param { max_expand_ratio: 1e30 }", "expected more than 1 and at most 16"),
        ("expand_param { max_expand_ratio: 2 }", "images differ in size: set resize_param"),
        (
            "expand_param { max_expand_ratio: 2 } resize_param { height: 2 width: 2 resize_mode: "
            "FIT_SMALL_SIZE }",
            "images differ in size",
        ),
        ("crop_h: 4", "only one of crop_h and crop_w"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        transform(text)


def test_an_expansion_with_a_mean_file_is_refused() -> None:
    with pytest.raises(DataError, match="has expand_param and mean_file"):
        Augmentation(param('expand_param { max_expand_ratio: 2 } mean_file: "m"'))


def test_floats_are_refused() -> None:
    made = transform("resize_param { height: 8 width: 9 }")
    with pytest.raises(DataError, match="the images are floats"):
        made.one(
            np.zeros((3, 4, 4), np.float32),
            made.draws(1, np.arange(1))[0],
            np.empty((3, 8, 9), np.float32),
        )


def test_a_crop_beyond_the_resized_image_is_refused() -> None:
    with pytest.raises(DataError, match="crop_size 30 x 5 is larger than the images"):
        transform("crop_h: 30 crop_w: 5 resize_param { height: 20 width: 20 }").output_shape(
            (3, 50, 50)
        )


WIDE_OF_RESIZE = np.random.default_rng(1).integers(0, 256, (30, 60, 3), np.uint8)
TALL = np.ascontiguousarray(WIDE_OF_RESIZE.transpose(1, 0, 2))


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
    for image, expected in ((WIDE_OF_RESIZE, wide), (TALL, tall)):
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
    made = resize(f"height: 20 width: 24 interp_mode: {name}")(WIDE_OF_RESIZE, Random(1))
    assert np.array_equal(made, cv2.resize(WIDE_OF_RESIZE, (24, 20), interpolation=flag))


def test_one_of_several_interpolations_is_drawn() -> None:
    made = resize("height: 20 width: 24 interp_mode: NEAREST interp_mode: CUBIC")
    choices = [
        cv2.resize(WIDE_OF_RESIZE, (24, 20), interpolation=flag)
        for flag in (cv2.INTER_NEAREST, cv2.INTER_CUBIC)
    ]
    drawn = [
        next(
            n
            for n, choice in enumerate(choices)
            if np.array_equal(choice, made(WIDE_OF_RESIZE, Random(seed)))
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
        WIDE_OF_RESIZE, Random(1)
    )
    inside = cv2.resize(WIDE_OF_RESIZE, (24, 12))
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
def test_refusals_of_resize(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resize(text)


def test_values_of_other_channels_are_refused() -> None:
    with pytest.raises(DataError, match="2 values of pad_value, but the images have 3 channels"):
        resize("height: 2 width: 2 pad_value: 1 pad_value: 2").check_channels(3)


def test_a_long_image_is_refused() -> None:
    with pytest.raises(DataError, match="would be resized to 200 x 80000"):
        resize("height: 200 width: 200 resize_mode: FIT_SMALL_SIZE").size(1, 400)
