"""Caffe's TransformationParameter: crop, mirror, mean, scale; before them SSD's steps.

Law: out = (pixel - mean) * scale with the mean at the pixel's position in the uncropped image, then
crop, then mirror, in float32 in this order, so that results are Caffe's to the bit. Random choices
depend only on the draws passed in. Images are distorted, expanded, resized and given noise before
all this, so a mean file has the size of the resized image.

Source: caffe/src/caffe/data_transformer.cpp. As in Caffe, `mirror` is random in the TEST phase too;
the crop is random in TRAIN and central in TEST, at offset (size - crop) // 2.

Shapes: N images, C channels, H x W before and h x w after the crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from poseidon.caffe.data.augmentation import Augmentation
from poseidon.caffe.data.batches.prefetch import draw
from poseidon.caffe.data.boxes import Box
from poseidon.caffe.data.datum import Decoding
from poseidon.caffe.data.mean import read_mean
from poseidon.caffe.proto.caffe_pb2 import TransformationParameter
from poseidon.errors import DataError, counted

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.int64]

LANES = 3  # random numbers for each record: row of the crop, column of the crop, mirror
SEED_LANES = 2  # and the seed of its augmentation, if there is any
STEPS = ("resize_param", "noise_param", "distort_param", "expand_param", "emit_constraint")


class CropPlacement(NamedTuple):
    """The part of an image that a crop takes, as fractions, and whether it is mirrored."""

    window: Box
    mirrored: bool


def generator(choice: Draws) -> Random:
    """Return a record's generator of augmentation, from its random numbers (LANES + SEED_LANES)."""
    return Random(int(choice[LANES]) << 31 | int(choice[LANES + 1]))


class Transform:
    """A validated TransformationParameter with its mean loaded. Immutable and thread-safe.

    Args:
        train: True in the TRAIN phase.
        resolve: resolves the path in mean_file.

    Raises:
        DataError: both mean_file and mean_value, or both force_color and force_gray are set, the
            mean file is wrong, or a field of the augmentation is; there are scale_factors, which
            layers of images with a label for each pixel read themselves.

    Attributes:
        augmentation: SSD's steps; None if the definition has none of their fields.
        mean: (C, H, W) from a file, (C, 1, 1) or (1, 1, 1) from values, or None.
        scale: of the difference.
        mirrors: whether records are mirrored by draw.
    """

    def __init__(
        self, param: TransformationParameter, *, train: bool, resolve: Callable[[str], Path]
    ) -> None:
        if param.HasField("mean_file") and param.mean_value:
            raise DataError("transform_param has both mean_file and mean_value: set one of them")
        if param.force_color and param.force_gray:
            raise DataError("transform_param has both force_color and force_gray: set one of them")
        if param.scale_factors:
            raise DataError(
                "transform_param has scale_factors, which only DenseImageData and ImageSegData read"
            )
        self.decoding = (
            Decoding.COLOR
            if param.force_color
            else Decoding.GRAY
            if param.force_gray
            else Decoding.AS_STORED
        )
        self._train = train
        self.mirrors = param.mirror
        self._crop = _crop(param)
        self.augmentation = (
            Augmentation(param) if any(param.HasField(name) for name in STEPS) else None
        )
        self.scale = np.float32(param.scale)
        self._mean_file = resolve(param.mean_file) if param.HasField("mean_file") else None
        self.mean = self._load_mean(param)
        if self.augmentation is not None and self.augmentation.expands and not self.has_fixed_size:
            raise DataError(
                "transform_param has expand_param, so that images differ in size: set resize_param "
                "with a different mode than FIT_SMALL_SIZE, or a crop"
            )

    def _load_mean(self, param: TransformationParameter) -> Floats | None:
        """Return the mean: (C, H, W) from a file, (C, 1, 1) or (1, 1, 1) from values, or None."""
        if self._mean_file is not None:
            return read_mean(self._mean_file)
        if param.mean_value:
            return np.array(param.mean_value, np.float32).reshape(-1, 1, 1)
        return None

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of a transformed image of `shape` (C, H, W).

        Raises:
            DataError: the mean has a different shape, or the crop is larger than the image.
        """
        channels, height, width = shape
        if self.augmentation is not None:
            self.augmentation.check_channels(channels)
            height, width = self.augmentation.size(height, width)
        return self.cropped_shape((channels, height, width))

    def cropped_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of an augmented image of `shape` (C, H, W) after the crop.

        Raises:
            DataError: the mean has a different shape, or the crop is larger than the image.
        """
        channels, height, width = shape
        extents = f"{channels} x {height} x {width}"
        if self.mean is not None:
            sizes = self.mean.shape
            if self._mean_file is not None and sizes != tuple(shape):
                raise DataError(
                    f"the mean file {self._mean_file} is {sizes[0]} x {sizes[1]} x {sizes[2]} "
                    f"(channels x height x width), but the images are {extents}"
                )
            if sizes[0] not in (1, channels):
                raise DataError(
                    f"transform_param has {sizes[0]} values of mean_value, but the images have "
                    f"{counted(channels, 'channel')}; give one value, or one for each channel"
                )
        if self._crop is None:
            return channels, height, width
        if self._crop[0] > height or self._crop[1] > width:
            crop = (
                self._crop[0] if self._crop[0] == self._crop[1] else "{} x {}".format(*self._crop)
            )
            raise DataError(
                f"crop_size {crop} is larger than the images, which are {extents}; make larger "
                "ones (poseidon convert_imageset --resize_height=H --resize_width=W), or crop less"
            )
        return channels, *self._crop

    @property
    def has_fixed_size(self) -> bool:
        """True if images of all sizes come out with one size."""
        if self._crop is not None:
            return True
        augmentation = self.augmentation
        return (
            augmentation is not None
            and augmentation.resize is not None
            and augmentation.resize.is_fixed
        )

    @property
    def has_window_of_mean(self) -> bool:
        """True if the mean of a pixel depends on the place of the crop."""
        return self._crop is not None and self._mean_file is not None

    def draws(self, seed: int, numbers: Draws) -> Draws:
        """Return random numbers for the records of these numbers: (N, LANES), or SEED_LANES more
        with augmentation.
        """
        return draw(seed, numbers, LANES if self.augmentation is None else LANES + SEED_LANES)

    def batch(self, images: Array, draws: Draws, out: Floats) -> None:
        """Transform images of one shape.

        Args:
            images: (N, C, H, W), uint8 or float32, with a shape that `output_shape` accepts.
            draws: from `draws`.
            out: (N, C, h, w), overwritten.
        """
        if self._crop is not None or self.augmentation is not None:
            for image, choice, target in zip(images, draws, out, strict=True):
                self.one(image, choice, target)
            return
        self._scaled_difference(images, self.mean, out)
        if self.mirrors:
            flipped = np.flatnonzero(draws[:, 2] % 2)
            out[flipped] = out[flipped][..., ::-1]

    def one(self, image: Array, choice: Draws, out: Floats) -> None:
        """Transform one image (C, H, W) into `out` (C, h, w) with random numbers of `draws`."""
        self.place(self._augmented(image, choice), choice, out)

    def _augmented(self, image: Array, choice: Draws) -> Array:
        augmentation = self.augmentation
        if augmentation is None:
            return image
        random = generator(choice)
        pixels, _ = augmentation.before(pixels_of(image), (), random)
        return planes(augmentation.after(pixels, random))

    def crop_into(self, image: Array, choice: Draws, out: Array) -> tuple[int, int, bool]:
        """Copy the pixels that `one` takes of an image (C, H, W) to `out` (C, h, w), as they are.

        Return the row and the column of the crop, and whether `one` mirrors it.
        """
        image = self._augmented(image, choice)
        rows, columns = slice(0, None), slice(0, None)
        if self._crop is not None:
            rows, columns = self._window(image.shape, choice)
        np.copyto(out, image[:, rows, columns])
        return rows.start, columns.start, self.mirrors and bool(choice[2] % 2)

    def place(self, image: Array, choice: Draws, out: Floats) -> CropPlacement:
        """Transform one image (C, H, W) that is augmented already.

        Return the part of it that `out` shows.
        """
        mean = self.mean
        window = Box(0.0, 0.0, 1.0, 1.0)
        if self._crop is not None:
            _, height, width = image.shape
            rows, columns = self._window(image.shape, choice)
            window = Box(
                columns.start / width, rows.start / height, columns.stop / width, rows.stop / height
            )
            image = image[:, rows, columns]
            if self._mean_file is not None and mean is not None:
                mean = mean[:, rows, columns]
        mirrored = self.mirrors and bool(choice[2] % 2)
        self._scaled_difference(image, mean, out[..., ::-1] if mirrored else out)
        return CropPlacement(window, mirrored)

    def placed(self, image: Array, choice: Draws) -> Array:
        """Return the part of an image (C, H, W) that `one` takes with the same random numbers,
        mirrored as there, with its values unchanged.
        """
        if self._crop:
            rows, columns = self._window(image.shape, choice)
            image = image[:, rows, columns]
        return image[..., ::-1] if self.mirrors and bool(choice[2] % 2) else image

    def extended_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return an image's shape (C, H, W) with at least the extents of the crop."""
        channels, height, width = shape
        high, wide = self._crop or (0, 0)
        return channels, max(height, high), max(width, wide)

    def extended(self, image: Array, *, value: float | None = None) -> Array:
        """Return an image (C, H, W) with at least the extents of the crop: below and on the right
        `value` is added, or the mean of mean_value, or without it 0.
        """
        shape = self.extended_shape(image.shape)
        if shape == image.shape:
            return image
        larger = np.zeros(shape, np.float32)
        if value is not None:
            larger[:] = value
        elif self.mean is not None:
            larger[:] = self.mean
        larger[:, : image.shape[1], : image.shape[2]] = image
        return larger

    def _window(self, shape: tuple[int, ...], choice: Draws) -> tuple[slice, slice]:
        assert self._crop is not None
        high, wide = self._crop
        spare = (shape[1] - high, shape[2] - wide)
        if self._train:
            top, left = int(choice[0]) % (spare[0] + 1), int(choice[1]) % (spare[1] + 1)
        else:
            top, left = spare[0] // 2, spare[1] // 2
        return slice(top, top + high), slice(left, left + wide)

    def _scaled_difference(self, image: Array, mean: Floats | None, out: Floats) -> None:
        if mean is None:
            np.copyto(out, image)
        else:
            np.subtract(image, mean, out=out, dtype=np.float32)
        if self.scale != 1:
            np.multiply(out, self.scale, out=out)


def _crop(param: TransformationParameter) -> tuple[int, int] | None:
    """Return height and width of the crop, or None. crop_size has priority, as in SSD."""
    if param.crop_size:
        return param.crop_size, param.crop_size
    if bool(param.crop_h) != bool(param.crop_w):
        raise DataError("transform_param has only one of crop_h and crop_w, expected both or none")
    return (param.crop_h, param.crop_w) if param.crop_h else None


def pixels_of(image: Array) -> Array:
    """Convert an image (C, H, W) to (H, W, C), or (H, W) if it has one channel.

    Raises:
        DataError: the values are not bytes.
    """
    if image.dtype != np.uint8:
        raise DataError(
            "the images are floats: resize_param and the other steps of SSD need bytes, 0 to 255"
        )
    return image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))


def planes(pixels: Array) -> Array:
    """Convert an image (H, W) or (H, W, C) to (C, H, W)."""
    if pixels.ndim == 2:
        return pixels[np.newaxis]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
