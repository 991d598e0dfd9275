"""The way of an image into a batch, by numpy."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from poseidon.caffe2.images.transform import Transform
from tests.support.caffe2_images import picture

DEFAULTS: dict[str, Any] = {
    "crop": 8,
    "scale": 12,
    "minsize": -1,
    "warp": False,
    "random_scale": (-1, -1),
    "mirror": False,
    "mean": np.array([0.0]),
    "std": np.array([1.0]),
    "color_jitter": False,
    "jitter": (0.4, 0.4, 0.4),
    "color_lighting": 0.0,
    "inception": False,
    "box": (-1, -1, -1, -1),
    "is_test": True,
}


def pixels(image: np.ndarray, seed: int = 0, **options: Any) -> np.ndarray:
    return Transform(**{**DEFAULTS, **options}).pixels(image, None, np.random.default_rng(seed))


def area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize(
    ("size", "options", "resized"),
    [
        ((24, 32), {}, (12, 16)),
        ((31, 24), {}, (15, 12)),
        ((6, 9), {}, (12, 18)),
        ((24, 32), {"scale": -1, "minsize": 12}, None),
        ((9, 10), {"scale": -1, "minsize": 12}, (12, 13)),
        ((24, 32), {"warp": True}, (12, 12)),
        ((24, 32), {"is_test": True, "random_scale": (20, 30)}, (12, 16)),
    ],
)
def test_sizes(
    size: tuple[int, int], options: dict[str, Any], resized: tuple[int, int] | None
) -> None:
    image = picture(1, *size)
    whole = area(image, *resized) if resized else image
    top, left = (whole.shape[0] - 8) // 2, (whole.shape[1] - 8) // 2
    np.testing.assert_array_equal(pixels(image, **options), whole[top : top + 8, left : left + 8])


@pytest.mark.parametrize(("box", "used"), [((2, 3, 14, 18), True), ((2, 3, 30, 18), False)])
def test_a_default_box(box: tuple[int, int, int, int], used: bool) -> None:
    image = picture(2, 24, 32)
    expected = pixels(image[2:16, 3:21]) if used else pixels(image)
    np.testing.assert_array_equal(pixels(image, box=box), expected)


def test_a_random_scale_lies_in_its_range() -> None:
    image = picture(3, 24, 24)
    found = {
        pixels(image, seed, is_test=False, random_scale=(8, 9), crop=8).tobytes()
        for seed in range(30)
    }
    assert area(image, 8, 8).tobytes() in found
    assert len(found) > 1


def test_inception_takes_parts_of_a_right_size() -> None:
    """Of an image whose pixels are their row, the crop's range is the height of the part."""
    rows = np.repeat(np.arange(100, dtype=np.uint8)[:, np.newaxis], 100, 1)
    for seed in range(20):
        part = pixels(rows, seed, is_test=False, inception=True)
        assert part.shape == (8, 8)
        height = (int(part[-1, 0]) - int(part[0, 0])) * 8 / 7
        assert 100 * np.sqrt(0.08 * 3 / 4) - 3 <= height <= 101
    assert pixels(rows, inception=True).tolist() == pixels(rows).tolist()


def colors(values: np.ndarray, seed: int, **options: Any) -> np.ndarray:
    transform = Transform(**{**DEFAULTS, "is_test": False, **options})
    return transform.normalized(values, np.random.default_rng(seed))


def test_brightness_is_one_factor() -> None:
    image = picture(4, 8, 8)
    ratio = (
        colors(image, 0, color_jitter=True, jitter=(0.0, 0.4, 0.0))[image > 0] / image[image > 0]
    )
    assert ratio.std() < 1e-5
    assert 0.6 <= ratio[0] <= 1.4


def test_saturation_keeps_gray_values_and_contrast_their_mean() -> None:
    image, gray = picture(5, 8, 8), np.array([0.114, 0.587, 0.299])
    saturated = colors(image, 1, color_jitter=True, jitter=(0.4, 0.0, 0.0))
    np.testing.assert_allclose(saturated @ gray, image @ gray, rtol=1e-4)
    assert np.abs(saturated - image).max() > 1
    contrast = colors(image, 1, color_jitter=True, jitter=(0.0, 0.0, 0.4))
    np.testing.assert_allclose((contrast @ gray).mean(), (image @ gray).mean(), rtol=1e-4)
    assert np.abs(contrast - image).max() > 1


def test_lighting_adds_one_color() -> None:
    image = picture(6, 8, 8)
    noise = colors(image, 2, color_lighting=0.1) - image
    assert np.ptp(noise, (0, 1)).max() < 1e-4
    assert np.abs(noise).max() > 0
    assert not np.any(colors(image, 2, color_lighting=0.1, is_test=True) - image)


def test_an_image_that_is_too_small_names_both_sizes() -> None:
    with pytest.raises(RuntimeError, match="9 x 7 is smaller than crop=8"):
        Transform(**{**DEFAULTS, "scale": 12})._cropped(picture(0, 9, 7), np.random.default_rng(0))
