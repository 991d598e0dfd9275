"""Noise and distortion against OpenCV's functions, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import text_format

from poseidon.caffe.data.pixels import Distort, Noise, linear
from poseidon.caffe.proto.caffe_pb2 import DistortionParameter, NoiseParameter
from poseidon.errors import DataError

Pixels = npt.NDArray[Any]
COLOR = np.random.default_rng(2).integers(0, 256, (24, 30, 3), np.uint8)
GRAY = np.ascontiguousarray(COLOR[..., 0])


def noise(text: str) -> Noise:
    return Noise(text_format.Parse(text, NoiseParameter()))


def distort(text: str) -> Distort:
    return Distort(text_format.Parse(text, DistortionParameter()))


def luminance(change: Callable[[Pixels], Pixels]) -> Pixels:
    space = cv2.cvtColor(COLOR, cv2.COLOR_BGR2YCrCb)
    space[..., 0] = change(np.ascontiguousarray(space[..., 0]))
    return cv2.cvtColor(space, cv2.COLOR_YCrCb2BGR)


def jpeg(image: Pixels, flag: int) -> Pixels:
    found = cv2.imdecode(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 40])[1], flag)
    assert found is not None
    return found


EROSION = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("inverse: true", lambda: 255 - COLOR),
        ("gauss_blur: true", lambda: cv2.GaussianBlur(COLOR, (7, 7), 1.5)),
        ("hist_eq: true", lambda: luminance(cv2.equalizeHist)),
        ("clahe: true", lambda: luminance(cv2.createCLAHE(4.0).apply)),
        ("jpeg: 40", lambda: jpeg(COLOR, cv2.IMREAD_COLOR)),
        ("erode: true", lambda: cv2.erode(COLOR, EROSION)),
        ("posterize: true", lambda: COLOR // 64 * 64 + 32),
        ("convert_to_hsv: true", lambda: cv2.cvtColor(COLOR, cv2.COLOR_BGR2HSV)),
        ("convert_to_lab: true", lambda: cv2.cvtColor(COLOR, cv2.COLOR_BGR2Lab)),
        ("prob: 1", lambda: COLOR),
    ],
)
def test_noise_of_color_images(text: str, expected: Callable[[], Pixels]) -> None:
    made = noise(text)
    made.check_channels(3)
    assert np.array_equal(made(COLOR, Random(1)), expected())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hist_eq: true", lambda: cv2.equalizeHist(GRAY)),
        ("decolorize: true", lambda: GRAY),
        ("jpeg: 40", lambda: jpeg(GRAY, cv2.IMREAD_GRAYSCALE)),
    ],
)
def test_noise_of_gray_images(text: str, expected: Callable[[], Pixels]) -> None:
    made = noise(text)
    made.check_channels(1)
    assert np.array_equal(made(GRAY, Random(1)), expected())


def test_decolorized_images_have_equal_channels() -> None:
    made = noise("decolorize: true")(COLOR, Random(1))
    assert (made == cv2.cvtColor(COLOR, cv2.COLOR_BGR2GRAY)[..., None]).all()


def test_salt_and_pepper() -> None:
    made = noise("saltpepper: true saltpepper_param { fraction: 0.1 value: 1 value: 2 value: 3 }")
    changed = (made(COLOR, Random(1)) != COLOR).any(-1)
    assert 50 < changed.sum() <= 72  # 72 of 720 pixels, of which some coincide
    assert (made(COLOR, Random(1))[changed] == [1, 2, 3]).all()
    assert not np.array_equal(made(COLOR, Random(1)), made(COLOR, Random(2)))


def test_linear_values_are_rounded_and_limited() -> None:
    image = np.array([[0, 1, 3, 200, 255]], np.uint8)
    assert linear(image, 1.5, 0).tolist() == [[0, 2, 4, 255, 255]]  # halves to even
    assert linear(image, 1, -10.4).tolist() == [[0, 0, 0, 190, 245]]


def hsv(channel: int, change: Callable[[Pixels], Pixels]) -> Pixels:
    space = cv2.cvtColor(COLOR, cv2.COLOR_BGR2HSV)
    space[..., channel] = change(space[..., channel])
    return cv2.cvtColor(space, cv2.COLOR_HSV2BGR)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", lambda: COLOR),
        (
            "contrast_prob: 1.1 contrast_lower: 1.5 contrast_upper: 1.5",
            lambda: linear(COLOR, 1.5, 0),
        ),
        (
            "saturation_prob: 1.1 saturation_lower: 0.5 saturation_upper: 0.5",
            lambda: hsv(1, lambda s: linear(s, 0.5, 0)),
        ),
        ("brightness_prob: 0 brightness_delta: 30 hue_delta: 30", lambda: COLOR),
    ],
)
def test_distortions_of_a_fixed_size(text: str, expected: Callable[[], Pixels]) -> None:
    assert np.array_equal(distort(text)(COLOR, Random(3)), expected())


def test_random_distortions_stay_in_their_ranges() -> None:
    made = distort("brightness_prob: 1.1 brightness_delta: 10")
    middle = np.full((4, 4, 3), 128, np.uint8)
    deltas = [int(made(middle, Random(seed))[0, 0, 0]) - 128 for seed in range(200)]
    assert min(deltas) < -7 and max(deltas) > 7 and max(map(abs, deltas)) <= 10
    made = distort("random_order_prob: 1.1")
    orders = {
        tuple(made(np.array([[[1, 2, 3]]], np.uint8), Random(seed)).ravel()) for seed in range(60)
    }
    assert len(orders) == 6


def test_half_of_the_images_change_contrast_before_saturation() -> None:
    made = distort(
        "contrast_prob: 1.1 contrast_lower: 2 contrast_upper: 2 "
        "saturation_prob: 1.1 saturation_lower: 0.5 saturation_upper: 0.5"
    )
    first = linear(COLOR, 2, 0)
    space = cv2.cvtColor(first, cv2.COLOR_BGR2HSV)
    space[..., 1] = linear(space[..., 1], 0.5, 0)
    orders = [
        cv2.cvtColor(space, cv2.COLOR_HSV2BGR),
        linear(hsv(1, lambda s: linear(s, 0.5, 0)), 2, 0),
    ]
    found = [
        next(
            n for n, order in enumerate(orders) if np.array_equal(order, made(COLOR, Random(seed)))
        )
        for seed in range(40)
    ]
    assert 8 < sum(found) < 32


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (noise, "saltpepper: true", "saltpepper_param has no value"),
        (noise, "saltpepper_param { fraction: 2 }", "fraction 2, expected 0 to 1"),
        (noise, "jpeg: 200", "jpeg 200, expected a quality of at most 100"),
        (noise, "jpeg: nan", "jpeg nan, expected a finite number"),
        (distort, "brightness_prob: 1 brightness_delta: -1", "brightness_delta -1"),
        (distort, "hue_prob: 1 hue_delta: -1", "hue_delta -1, expected at least 0"),
        (distort, "contrast_prob: 1 contrast_lower: 2 contrast_upper: 1", "contrast from 2 to 1"),
        (distort, "saturation_prob: 1 saturation_lower: -1", "saturation from -1 to 0"),
        (distort, "hue_delta: inf", "hue_delta inf, expected a finite number"),
    ],
)
def test_refusals(make: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(text)


@pytest.mark.parametrize(
    ("made", "channels", "message"),
    [
        (noise(""), 4, "gray and color images, but the images have 4 channels"),
        (noise("saltpepper: true saltpepper_param { value: 1 value: 2 }"), 3, "has 2 values"),
        (noise("convert_to_hsv: true"), 1, "but the images are gray"),
        (distort("hue_prob: 0.5"), 1, "changes colors, but the images have 1 channels"),
        (distort(""), 2, "changes colors, but the images have 2 channels"),
    ],
)
def test_other_channels_are_refused(made: Noise | Distort, channels: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        made.check_channels(channels)
