"""Images on their way into a batch: bounding box, size, crop, mirror, colors.

Law: an image's random choices depend on its generator only. Channels are in BGR order,
values are 0..255 until the mean is subtracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.caffe2.runtime.errors import EnforceNotMet

Array = npt.NDArray[Any]
Box = tuple[int, int, int, int]

GRAY = np.array([0.114, 0.587, 0.299], np.float32)
"""The weights of blue, green and red in a gray value."""
EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)
"""The principal components of ImageNet's pixels, rows in RGB order (Krizhevsky et al., 2012)."""
TRIES = 10
"""Draws of a part in the manner of Inception; then the image is resized and cropped as others
are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """The options of `ImageInput`, by its names.

    Attributes:
        crop: side of the output.
        scale: length of the shorter side; -1: `minsize` is given.
        minsize: least length of the shorter side; -1: `scale` is given.
        warp: both sides get the length.
        random_scale: least and largest length of the shorter side in training; (-1, -1): none.
        mirror: flip every second image in training, by chance.
        mean, std: for each channel.
        color_jitter: change saturation, brightness and contrast in training.
        jitter: the largest changes of these.
        color_lighting: the standard deviation of the lighting noise in training; 0: none.
        inception: cut parts of random area and aspect ratio in training.
        box: the part of images whose records name none.
        is_test: crop the center, and change nothing by chance.
    """

    crop: int
    scale: int
    minsize: int
    warp: bool
    random_scale: tuple[int, int]
    mirror: bool
    mean: Array
    std: Array
    color_jitter: bool
    jitter: tuple[float, float, float]
    color_lighting: float
    inception: bool
    box: Box
    is_test: bool

    def __post_init__(self) -> None:
        if self.crop < 1:
            raise ValueError(f"ImageInput: crop must be above 0, not {self.crop}")
        if (self.scale > 0) == (self.minsize > 0):
            raise ValueError("ImageInput: exactly one of scale and minsize must be above 0")
        if max(self.scale, self.minsize) < self.crop:
            raise ValueError(
                f"ImageInput: scale or minsize must be at least crop={self.crop}, not "
                f"{max(self.scale, self.minsize)}"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError(
                f"ImageInput: mean and std must have 1 or 3 values each, not {len(self.mean)} and "
                f"{len(self.std)}"
            )
        if not np.all(self.std):
            raise ValueError("ImageInput: std must not be 0")
        least, most = self.random_scale
        if self.random_scale != (-1, -1) and not self.crop <= least <= most:
            raise ValueError(
                f"ImageInput: random_scale must be two lengths from crop={self.crop} on, not "
                f"{[least, most]}"
            )

    def pixels(self, image: Array, box: Box | None, random: np.random.Generator) -> Array:
        """Return the part of an image for the batch, uint8 (crop, crop, C) or (crop, crop).

        Args:
            image: uint8 (H, W, C) or (H, W).
            box: the part that its record names, if any; one that does not fit is ignored.
            random: the image's own random numbers.
        """
        top, left, height, width = box or self.box
        inside = (
            top >= 0
            and left >= 0
            and top + height <= image.shape[0]
            and left + width <= image.shape[1]
        )
        if inside and height > 0 and width > 0:
            image = image[top : top + height, left : left + width]
        part = self._part(image, random) if self.inception and not self.is_test else None
        image = self._resized(image, random) if part is None else part
        return self._cropped(image, random)

    def normalized(self, pixels: Array, random: np.random.Generator) -> Array:
        """Return pixels with changed colors (if asked for), less the mean, over the deviation."""
        values = pixels.astype(np.float32)
        if values.ndim == 3 and not self.is_test:
            if self.color_jitter:
                self._jitter(values, random)
            if self.color_lighting:
                self._light(values, random)
        inverse = np.float32(1) / self.std.astype(np.float32)
        channels = values.shape[2] if values.ndim == 3 else 1
        mean = self.mean.astype(np.float32)
        values -= mean[0] if channels == 1 else mean
        values *= inverse[0] if channels == 1 else inverse
        return values

    def _part(self, image: Array, random: np.random.Generator) -> Array | None:
        """Return a part of random area and aspect, resized to the crop; None where no draw fits."""
        height, width = image.shape[:2]
        for _ in range(TRIES):
            area = math.ceil(random.uniform(0.08, 1.0) * height * width)
            ratio = random.uniform(3 / 4, 4 / 3)
            high, wide = math.isqrt(int(area / ratio)), math.isqrt(int(area * ratio))
            if 1 <= high <= height and 1 <= wide <= width:
                top = int(random.integers(height - high + 1))
                left = int(random.integers(width - wide + 1))
                return _resized(image[top : top + high, left : left + wide], self.crop, self.crop)
        return None

    def _resized(self, image: Array, random: np.random.Generator) -> Array:
        length = max(self.scale, self.minsize)
        if self.random_scale[0] > 0 and not self.is_test:
            length = int(random.integers(self.random_scale[0], self.random_scale[1] + 1))
        height, width = image.shape[:2]
        single = np.float32
        if self.warp:
            high = wide = length
        elif height > width:
            high, wide = int(single(height) * single(length) / single(width)), length
        else:
            high, wide = length, int(single(width) * single(length) / single(height))
        if (self.scale > 0 and (high, wide) != (height, width)) or high > height or wide > width:
            return _resized(image, high, wide)
        return image

    def _cropped(self, image: Array, random: np.random.Generator) -> Array:
        rest = image.shape[0] - self.crop, image.shape[1] - self.crop
        if min(rest) < 0:
            raise EnforceNotMet(
                f"an image of {image.shape[0]} x {image.shape[1]} is smaller than crop={self.crop}"
            )
        if self.is_test:
            top, left = rest[0] // 2, rest[1] // 2
        else:
            left, top = int(random.integers(rest[1] + 1)), int(random.integers(rest[0] + 1))
        image = image[top : top + self.crop, left : left + self.crop]
        if self.mirror and not self.is_test and random.random() < 0.5:
            image = image[:, ::-1]
        return image

    def _jitter(self, values: Array, random: np.random.Generator) -> None:
        """Change saturation, brightness and contrast in place, in random order."""
        for which in random.permutation(3):
            strength = self.jitter[which]
            factor = np.float32(1 + random.uniform(-strength, strength))
            if which == 0:
                other: Any = (values @ GRAY)[..., np.newaxis]
            else:
                other = np.float32(0) if which == 1 else (values @ GRAY).mean()
            values *= factor
            values += other * (1 - factor)

    def _light(self, values: Array, random: np.random.Generator) -> None:
        """Add noise along the principal components in place."""
        noise = random.normal(0, self.color_lighting, 3) * EIGENVALUES
        values += (255 * EIGENVECTORS @ noise)[::-1].astype(np.float32)


def _resized(image: Array, height: int, width: int) -> Array:
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
