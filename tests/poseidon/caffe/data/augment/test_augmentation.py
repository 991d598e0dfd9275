"""The steps together: expansion, and boxes that stay on their objects."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from google.protobuf import text_format

from poseidon.caffe.data.augment.augmentation import Augmentation
from poseidon.caffe.data.augment.boxes import Box, Object
from poseidon.caffe.data.batches.transform import (
    LANES,
    SEED_LANES,
    Transform,
    generator,
    pixels_of,
    planes,
)
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
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
    ) == (
        3,
        5,
        5,
    )
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
    with pytest.raises(
        DataError, match="crop_size 30 x 5 is larger than the images, which are 3 x 20 x 20"
    ):
        transform("crop_h: 30 crop_w: 5 resize_param { height: 20 width: 20 }").output_shape(
            (3, 50, 50)
        )
