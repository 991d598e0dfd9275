"""SSD's augmentation of an image with its objects: the fields of TransformationParameter beyond
BVLC Caffe's.

Law: a step is a function of the image and of a generator that is seeded by the record, so that
results depend neither on the worker nor on threads.

Source: data_transformer.cpp of SSD's branch of Caffe (Liu et al., 2016). Pixels stay pixels between
the steps: SSD writes a JPEG and reads it again after distortion, expansion and sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.augment.boxes import Box, Emission, Object, projected
from poseidon.caffe.data.augment.checks import check_finite
from poseidon.caffe.data.augment.pixels import Distort, Noise
from poseidon.caffe.data.augment.resize import Resize
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError

Pixels = npt.NDArray[Any]
LARGEST_EXPANSION = 16
# From here on a ratio counts as an expansion, as in SSD.
LEAST_EXPANSION = 1.01


class Augmentation:
    """The steps that resize_param, noise_param, distort_param, expand_param and emit_constraint
    ask for.

    Args:
        param: the transform_param.

    Raises:
        DataError: a field is out of range, or two contradict each other.
    """

    def __init__(self, param: TransformationParameter) -> None:
        self.resize = Resize(param.resize_param) if param.HasField("resize_param") else None
        self._noise = Noise(param.noise_param) if param.HasField("noise_param") else None
        self._distort = Distort(param.distort_param) if param.HasField("distort_param") else None
        self.emission = (
            Emission(param.emit_constraint) if param.HasField("emit_constraint") else None
        )
        self._ratio, self._prob = 1.0, 0.0
        self._means = list(param.mean_value)
        if param.HasField("expand_param"):
            self._set_expansion(param)

    def _set_expansion(self, param: TransformationParameter) -> None:
        check_finite("expand_param", param.expand_param)
        self._ratio, self._prob = param.expand_param.max_expand_ratio, param.expand_param.prob
        if not 1 < self._ratio <= LARGEST_EXPANSION:
            raise DataError(
                f"expand_param has max_expand_ratio {self._ratio:g}, expected more than 1 and at "
                f"most {LARGEST_EXPANSION}"
            )
        if param.HasField("mean_file"):
            raise DataError(
                "transform_param has expand_param and mean_file: set mean_value, which fills the "
                "border"
            )

    @property
    def expands(self) -> bool:
        """True if `before` may enlarge images."""
        return self._prob > 0 and self._ratio >= LEAST_EXPANSION

    def check_channels(self, channels: int) -> None:
        """Raise DataError unless the steps can be applied to images of `channels` channels."""
        for step in (self.resize, self._noise, self._distort):
            if step is not None:
                step.check_channels(channels)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after all steps."""
        return self.resize.size(height, width) if self.resize is not None else (height, width)

    def before(
        self, image: Pixels, objects: Sequence[Object], random: Random
    ) -> tuple[Pixels, Sequence[Object]]:
        """Return image and objects after the steps before the sampling: distortion and expansion.

        Args:
            image: (H, W) or (H, W, C), uint8.
            objects: the objects in it.
            random: the generator of this record.
        """
        if self._distort is not None:
            image = self._distort(image, random)
        if not self.expands or random.random() > self._prob:
            return image, objects
        ratio = random.uniform(1, self._ratio)
        height, width = image.shape[:2]
        high, wide = int(height * ratio), int(width * ratio)
        top, left = int(random.uniform(0, high - height)), int(random.uniform(0, wide - width))
        canvas = np.empty((high, wide, *image.shape[2:]), image.dtype)
        border = np.rint(self._means or [0]).clip(0, 255)
        canvas[...] = border if image.ndim == 3 else border[0]
        canvas[top : top + height, left : left + width] = image
        window = Box(-left / width, -top / height, (wide - left) / width, (high - top) / height)
        return canvas, projected(objects, window, self.emission)

    def after(self, image: Pixels, random: Random) -> Pixels:
        """Return an image after the steps that follow the sampling: resizing and noise."""
        if self.resize is not None:
            image = self.resize(image, random)
        return self._noise(image, random) if self._noise is not None else image

    def placed(
        self, objects: Sequence[Object], size: tuple[int, int], window: Box, *, mirrored: bool
    ) -> list[Object]:
        """Return the objects in the transformed image.

        Args:
            objects: in the coordinates of the image before `after`.
            size: height and width of that image.
            window: the crop, in the coordinates of the image after it.
            mirrored: the crop is mirrored.
        """
        resize = self.resize
        if resize is not None:
            objects = [item._replace(box=resize.moved(item.box, *size)) for item in objects]
        found = projected(objects, window, self.emission)
        if mirrored:
            found = [item._replace(box=item.box.mirrored()) for item in found]
        if resize is not None:
            found = [
                item._replace(box=resize.extrapolated(item.box, *size, window)) for item in found
            ]
        return found
