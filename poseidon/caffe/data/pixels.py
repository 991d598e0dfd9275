"""Changes of pixels: NoiseParameter and DistortionParameter.

Law: images are uint8, (H, W) or (H, W, 3) in BGR order, and stay so. Values are rounded and limited
to 0 .. 255 after each step, as by OpenCV's convertTo.

Source: util/im_transforms.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.batches.prefetch import draw
from poseidon.caffe.data.boxes import check_finite
from poseidon.caffe.proto.caffe_pb2 import DistortionParameter, NoiseParameter
from poseidon.errors import DataError

Pixels = npt.NDArray[Any]
POSTERIZED = 64  # the width of a step of posterized values
CLIP_LIMIT = 4.0  # of the local histogram equalization
COLORS = 3


def linear(image: Pixels, factor: float, summand: float) -> Pixels:
    """Return factor x + summand for each value x."""
    table = np.rint(np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(summand))
    return cv2.LUT(image, table.clip(0, 255).astype(np.uint8))


def in_space(
    image: Pixels, to: int, back: int, channel: int, change: Callable[[Pixels], Pixels]
) -> Pixels:
    """Return an image of which one channel is changed in a different color space."""
    channels = list(cv2.split(cv2.cvtColor(image, to)))
    channels[channel] = change(channels[channel])
    return cv2.cvtColor(cv2.merge(channels), back)


class Noise:
    """A validated NoiseParameter. `prob` has no effect, as in SSD.

    The steps, in this order: decolorize, gauss_blur, hist_eq, clahe, jpeg, erode, posterize,
    inverse, saltpepper, convert_to_hsv, convert_to_lab. Gray images skip decolorize. convert_to_lab
    gives OpenCV's 8-bit values (SSD reads bytes of floats there).

    Raises:
        DataError: saltpepper_param is incomplete, or a number is out of range.
    """

    def __init__(self, param: NoiseParameter) -> None:
        check_finite("noise_param", param)
        check_finite("saltpepper_param", param.saltpepper_param)
        salt = param.saltpepper_param
        if param.saltpepper and not salt.value:
            raise DataError("noise_param has saltpepper, but saltpepper_param has no value")
        if not 0 <= salt.fraction <= 1:
            raise DataError(f"saltpepper_param has fraction {salt.fraction:g}, expected 0 to 1")
        if param.jpeg > 100:
            raise DataError(
                f"noise_param has jpeg {param.jpeg:g}, expected a quality of at most 100"
            )
        self._param = param

    def check_channels(self, channels: int) -> None:
        """Raise DataError unless the noise can be applied to images of `channels` channels."""
        param = self._param
        values = len(param.saltpepper_param.value)
        if channels not in (1, COLORS):
            raise DataError(
                f"noise_param applies to gray and color images, but the images have {channels} "
                "channels"
            )
        if param.saltpepper and values not in (1, channels):
            raise DataError(
                f"saltpepper_param has {values} values, but the images have {channels} channels: "
                f"expected 1 or {channels}"
            )
        if channels == 1 and (param.convert_to_hsv or param.convert_to_lab):
            raise DataError("noise_param converts colors, but the images are gray")

    def __call__(self, image: Pixels, random: Random) -> Pixels:
        """Return the image with noise."""
        param = self._param
        if param.decolorize and image.ndim == 3:
            image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
        if param.gauss_blur:
            image = cv2.GaussianBlur(image, (7, 7), 1.5)
        if param.hist_eq:
            image = _brightness_changed(image, cv2.equalizeHist)
        if param.clahe:
            image = _brightness_changed(image, cv2.createCLAHE(CLIP_LIMIT).apply)
        if param.jpeg > 0:
            image = _compressed(image, int(param.jpeg))
        if param.erode:
            image = cv2.erode(image, cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3), (1, 1)))
        if param.posterize:
            steps = np.arange(256) // POSTERIZED * POSTERIZED + POSTERIZED // 2
            image = cv2.LUT(image, steps.astype(np.uint8))
        if param.inverse:
            image = cv2.bitwise_not(image)
        if param.saltpepper:
            image = self._speckled(image, random)
        if param.convert_to_hsv:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
        if param.convert_to_lab:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2Lab)
        return image

    def _speckled(self, image: Pixels, random: Random) -> Pixels:
        """Return the image with a fraction of the pixels replaced. A pixel may be drawn twice."""
        salt = self._param.saltpepper_param
        height, width = image.shape[:2]
        numbers = np.arange(int(salt.fraction * height * width), dtype=np.int64)
        places = draw(random.getrandbits(62), numbers, 2)
        values = np.array([int(value) % 256 for value in salt.value], np.uint8)
        image = image.copy()
        image[places[:, 0] % height, places[:, 1] % width] = (
            values if image.ndim == 3 else values[0]
        )
        return image


def _brightness_changed(image: Pixels, change: Callable[[Pixels], Pixels]) -> Pixels:
    if image.ndim == 2:
        return change(image)
    return in_space(image, cv2.COLOR_BGR2YCrCb, cv2.COLOR_YCrCb2BGR, 0, change)


def _compressed(image: Pixels, quality: int) -> Pixels:
    """Return the image after a JPEG encoder and decoder."""
    _, content = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    found = cv2.imdecode(content, cv2.IMREAD_GRAYSCALE if image.ndim == 2 else cv2.IMREAD_COLOR)
    assert found is not None
    return found


class Distort:
    """A DistortionParameter: random brightness, contrast, saturation, hue, order of channels.

    Contrast is changed second or fourth, each for half of the images.

    Raises:
        DataError: a delta is negative, a range is not increasing, or a number is not finite.
    """

    def __init__(self, param: DistortionParameter) -> None:
        check_finite("distort_param", param)
        if param.brightness_prob > 0 and param.brightness_delta < 0:
            raise DataError(
                f"distort_param has brightness_delta {param.brightness_delta:g}, expected at "
                "least 0"
            )
        if param.hue_prob > 0 and param.hue_delta < 0:
            raise DataError(f"distort_param has hue_delta {param.hue_delta:g}, expected at least 0")
        for what in ("contrast", "saturation"):
            least, most = (getattr(param, f"{what}_{side}") for side in ("lower", "upper"))
            if getattr(param, f"{what}_prob") > 0 and not 0 <= least <= most:
                raise DataError(
                    f"distort_param has {what} from {least:g} to {most:g}, expected an increasing "
                    "range from 0"
                )
        self._param = param

    def check_channels(self, channels: int) -> None:
        """Raise DataError unless the images can be distorted."""
        param = self._param
        needs_color = max(param.saturation_prob, param.hue_prob, param.random_order_prob) > 0
        if channels != COLORS and (needs_color or channels != 1):
            raise DataError(
                f"distort_param changes colors, but the images have {channels} channels"
            )

    def __call__(self, image: Pixels, random: Random) -> Pixels:
        """Return the image with random changes."""
        colors = (self._saturation, self._hue)
        middle = (self._contrast, *colors) if random.random() > 0.5 else (*colors, self._contrast)
        for step in (self._brightness, *middle, self._order):
            image = step(image, random)
        return image

    def _brightness(self, image: Pixels, random: Random) -> Pixels:
        if random.random() >= self._param.brightness_prob:
            return image
        delta = self._param.brightness_delta
        return linear(image, 1.0, random.uniform(-delta, delta))

    def _contrast(self, image: Pixels, random: Random) -> Pixels:
        if random.random() >= self._param.contrast_prob:
            return image
        return linear(
            image, random.uniform(self._param.contrast_lower, self._param.contrast_upper), 0.0
        )

    def _saturation(self, image: Pixels, random: Random) -> Pixels:
        if random.random() >= self._param.saturation_prob:
            return image
        factor = random.uniform(self._param.saturation_lower, self._param.saturation_upper)
        return in_space(
            image,
            cv2.COLOR_BGR2HSV,
            cv2.COLOR_HSV2BGR,
            1,
            lambda channel: linear(channel, factor, 0.0),
        )

    def _hue(self, image: Pixels, random: Random) -> Pixels:
        if random.random() >= self._param.hue_prob:
            return image
        delta = random.uniform(-self._param.hue_delta, self._param.hue_delta)
        return in_space(
            image,
            cv2.COLOR_BGR2HSV,
            cv2.COLOR_HSV2BGR,
            0,
            lambda channel: linear(channel, 1.0, delta),
        )

    def _order(self, image: Pixels, random: Random) -> Pixels:
        if random.random() >= self._param.random_order_prob:
            return image
        order = [0, 1, 2]
        random.shuffle(order)
        return np.ascontiguousarray(image[..., order])
