"""SSD's augmentation of an image with its objects, and its resizing: the fields of
TransformationParameter beyond BVLC Caffe's.

Law: a step is a function of the image and of a generator that is seeded by the record, so that
results depend neither on the worker nor on threads.

Source: data_transformer.cpp of SSD's branch of Caffe (Liu et al., 2016). Pixels stay pixels between
the steps: SSD writes a JPEG and reads it again after distortion, expansion and sampling.

Resizing of images, and of the boxes in them, by a ResizeParameter.

Law: sizes, paddings and interpolation are as in the functions of OpenCV that SSD calls. Boxes move
by exact arithmetic. The field `prob` has no effect, as in SSD.

Source: util/im_transforms.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.boxes import Box, Emission, Object, check_finite, projected
from poseidon.caffe.data.pixels import Distort, Noise
from poseidon.caffe.proto.caffe_pb2 import ResizeParameter, TransformationParameter
from poseidon.errors import DataError

# OpenCV's limit of a side.
LARGEST_SIDE = 32_767
INTERPOLATION = {
    ResizeParameter.LINEAR: cv2.INTER_LINEAR,
    ResizeParameter.AREA: cv2.INTER_AREA,
    ResizeParameter.NEAREST: cv2.INTER_NEAREST,
    ResizeParameter.CUBIC: cv2.INTER_CUBIC,
    ResizeParameter.LANCZOS4: cv2.INTER_LANCZOS4,
}
PADDING = {
    ResizeParameter.CONSTANT: cv2.BORDER_CONSTANT,
    ResizeParameter.MIRRORED: cv2.BORDER_REFLECT_101,
    ResizeParameter.REPEAT_NEAREST: cv2.BORDER_REPLICATE,
}


class Resize:
    """A validated ResizeParameter.

    Modes: WARP resizes to height x width. FIT_SMALL_SIZE keeps the aspect ratio; the image covers
    height x width. FIT_LARGE_SIZE_AND_PAD keeps it; the image fits into height x width and is
    padded to it.

    Args:
        param: the resize_param. One of the interp_modes is drawn for each image.

    Raises:
        DataError: height or width is missing or too large, or a number is not finite.
    """

    def __init__(self, param: ResizeParameter) -> None:
        check_finite("resize_param", param)
        if not (1 <= param.height <= LARGEST_SIDE and 1 <= param.width <= LARGEST_SIDE):
            raise DataError(
                f"resize_param has height {param.height} and width {param.width}, expected 1 to "
                f"{LARGEST_SIDE} each"
            )
        self._param = param
        self._target = (param.height, param.width)
        self._modes = [INTERPOLATION[mode] for mode in param.interp_mode] or [cv2.INTER_LINEAR]
        self._values = list(param.pad_value)

    @property
    def is_fixed(self) -> bool:
        """True if all images get one size."""
        return self._param.resize_mode != ResizeParameter.FIT_SMALL_SIZE

    def check_channels(self, channels: int) -> None:
        """Raise DataError unless pad_value suits images of `channels` channels."""
        if len(self._values) not in (0, 1, channels):
            raise DataError(
                f"resize_param has {len(self._values)} values of pad_value, but the images have "
                f"{channels} channels: expected 1 or {channels}"
            )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image."""
        return self._target if self.is_fixed else self._scaled(height, width, covers=True)

    def __call__(self, image: Pixels, random: Random) -> Pixels:
        """Return an image (H, W) or (H, W, C) resized."""
        # Without interp_mode nothing is drawn, as in SSD.
        chosen = (
            self._modes[random.randrange(len(self._modes))]
            if self._param.interp_mode
            else self._modes[0]
        )
        if self._param.resize_mode != ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
            high, wide = self.size(*image.shape[:2])
            return cv2.resize(image, (wide, high), interpolation=chosen)
        high, wide = self._scaled(*image.shape[:2], covers=False)
        fitted = cv2.resize(image, (wide, high), interpolation=chosen)
        rows, columns = self._target[0] - high, self._target[1] - wide
        top, left = rows // 2, columns // 2
        mode = PADDING[self._param.pad_mode]
        if mode == cv2.BORDER_REFLECT_101 and min(high, wide) == 1:
            mode = cv2.BORDER_REPLICATE  # a line has nothing to reflect
        value = self._values * 3 if len(self._values) == 1 else self._values or [0]
        return cv2.copyMakeBorder(fitted, top, rows - top, left, columns - left, mode, value=value)

    def _scaled(self, height: int, width: int, *, covers: bool) -> tuple[int, int]:
        """Return the size that covers the target, or fits into it, with the aspect ratio kept."""
        # In single precision, as in SSD, since it is rounded down.
        aspect = np.float32(width) / np.float32(height)
        wanted = np.float32(self._target[1]) / np.float32(self._target[0])
        by_width = aspect < wanted if covers else aspect > wanted
        if by_width:
            sides = (int(np.float32(self._target[1]) / aspect), self._target[1])
        else:
            sides = (self._target[0], int(aspect * np.float32(self._target[0])))
        if max(sides) > LARGEST_SIDE:
            raise DataError(
                f"an image of height {height} and width {width} would be resized to {sides[0]} x "
                f"{sides[1]}, expected at most {LARGEST_SIDE}"
            )
        return max(1, sides[0]), max(1, sides[1])

    def moved(self, box: Box, height: int, width: int) -> Box:
        """Return the box in the resized image of an image of this height and width."""
        high, wide = (float(side) for side in self._target)
        aspect = width / height
        if self._param.resize_mode != ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
            # Both sides are scaled, so that fractions stay.
            return _limited(box)
        if aspect > wide / high:
            margin = (high - wide / aspect) / 2 / high
            return _limited(box).located(Box(0.0, margin, 1.0, 1.0 - margin))
        margin = (wide - aspect * high) / 2 / wide
        return _limited(box).located(Box(margin, 0.0, 1.0 - margin, 1.0))

    def unmoved(self, box: Box, height: int, width: int) -> Box:
        """Return a box of the resized image in the coordinates of the image of this height and
        width, clipped to it.
        """
        if self._param.resize_mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
            inside = self.moved(Box(0.0, 0.0, 1.0, 1.0), height, width)
            return box.projected(inside) or box.clipped()
        param = self._param
        if not self.is_fixed and param.height_scale and param.width_scale:
            across, down = param.width_scale / width, param.height_scale / height
            box = Box(box.xmin * across, box.ymin * down, box.xmax * across, box.ymax * down)
        return box.clipped()

    def extrapolated(self, box: Box, height: int, width: int, window: Box) -> Box:
        """Return a box of the crop `window` in units of width_scale x height_scale, if
        FIT_SMALL_SIZE has them.

        Args:
            box: in the coordinates of the crop.
            height: the height of the image before it was resized.
            width: its width.
            window: the crop, in the coordinates of the resized image.

        Raises:
            DataError: the crop is smaller than height_scale x width_scale.
        """
        param = self._param
        if self.is_fixed or not (param.height_scale and param.width_scale):
            return box
        aspect, (high, wide) = width / height, (float(side) for side in self._target)
        if aspect < wide / high:
            high = wide / aspect
        else:
            wide = high * aspect
        high, wide = high * (window.ymax - window.ymin), wide * (window.xmax - window.xmin)
        if wide < param.width_scale or high < param.height_scale:
            raise DataError(
                f"a crop is {high:g} x {wide:g}, smaller than height_scale {param.height_scale} x "
                f"width_scale {param.width_scale} of resize_param"
            )
        across, down = wide / param.width_scale, high / param.height_scale
        return Box(box.xmin * across, box.ymin * down, box.xmax * across, box.ymax * down)


def _limited(box: Box) -> Box:
    """Return a box that does not start before the image, and does not end after it."""
    return Box(max(0.0, box.xmin), max(0.0, box.ymin), min(1.0, box.xmax), min(1.0, box.ymax))


Pixels = npt.NDArray[Any]
LARGEST_EXPANSION = 16
# From here on a ratio counts as an expansion, as in SSD.
LEAST_EXPANSION = 1.01


class Augmentation:
    """The steps of resize_param, noise_param, distort_param, expand_param, emit_constraint.

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
