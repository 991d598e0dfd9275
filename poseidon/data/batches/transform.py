"""Caffe's TransformationParameter: crop, mirror, mean and scale.

Law: out = (pixel - mean) * scale with the mean at the pixel's position in the uncropped image, then crop, then mirror, in
float32 in this order, so that results are Caffe's to the bit. Random choices depend only on the draws passed in.

Source: caffe/src/caffe/data_transformer.cpp. As in Caffe, `mirror` is random in the TEST phase too; the crop is random in
TRAIN and central in TEST, at offset (size - crop) // 2.

Shapes: N images, C channels, H x W before and h x w after the crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from poseidon.data.batches.draws import draw
from poseidon.data.datum import Decoding
from poseidon.data.mean import read_mean
from poseidon.errors import DataError
from poseidon.proto.caffe_pb2 import TransformationParameter

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.int64]

LANES = 3  # random numbers for each record: row of the crop, column of the crop, mirror


class Transform:
    """A validated TransformationParameter with its mean loaded. Immutable and thread-safe.

    Args:
        param: the layer's transform_param.
        train: True in the TRAIN phase.
        resolve: resolves the path in mean_file.

    Raises:
        DataError: both mean_file and mean_value, or both force_color and force_gray are set, or the mean file is wrong.
    """

    def __init__(
        self, param: TransformationParameter, *, train: bool, resolve: Callable[[str], Path]
    ) -> None:
        if param.HasField("mean_file") and param.mean_value:
            raise DataError("transform_param has both mean_file and mean_value: set one of them")
        if param.force_color and param.force_gray:
            raise DataError("transform_param has both force_color and force_gray: set one of them")
        self.decoding = (
            Decoding.COLOR if param.force_color else Decoding.GRAY if param.force_gray else Decoding.AS_STORED
        )
        self._train = train
        self._mirror = param.mirror
        self._crop = param.crop_size
        self._scale = np.float32(param.scale)
        self._mean_file = resolve(param.mean_file) if param.HasField("mean_file") else None
        self._mean = self._load_mean(param)

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
            DataError: the mean has another shape, or the crop is larger than the image.
        """
        channels, height, width = shape
        extents = f"{channels} x {height} x {width}"
        if self._mean is not None:
            sizes = self._mean.shape
            if self._mean_file is not None and sizes != tuple(shape):
                raise DataError(
                    f"the mean file {self._mean_file} is {sizes[0]} x {sizes[1]} x {sizes[2]} "
                    f"(channels x height x width), but the images are {extents}"
                )
            if sizes[0] not in (1, channels):
                raise DataError(
                    f"transform_param has {sizes[0]} values of mean_value, but the images have {channels} "
                    f"channels: expected 1 or {channels}"
                )
        if not self._crop:
            return channels, height, width
        if self._crop > min(height, width):
            raise DataError(f"crop_size {self._crop} is larger than the images, which are {extents}")
        return channels, self._crop, self._crop

    def draws(self, seed: int, numbers: Draws) -> Draws:
        """Return random numbers (N, LANES) for the records of these numbers; see `draws.draw`."""
        return draw(seed, numbers, LANES)

    def batch(self, images: Array, draws: Draws, out: Floats) -> None:
        """Transform images of one shape.

        Args:
            images: (N, C, H, W), uint8 or float32, with a shape that `output_shape` accepts.
            draws: (N, LANES), from `draws`.
            out: (N, C, h, w), overwritten.
        """
        if self._crop:
            for image, choice, target in zip(images, draws, out, strict=True):
                self.one(image, choice, target)
            return
        self._scaled_difference(images, self._mean, out)
        if self._mirror:
            flipped = np.flatnonzero(draws[:, 2] % 2)
            out[flipped] = out[flipped][..., ::-1]

    def one(self, image: Array, choice: Draws, out: Floats) -> None:
        """Transform one image (C, H, W) into `out` (C, h, w) with its random numbers (LANES)."""
        mean = self._mean
        if self._crop:
            rows, columns = self._window(image.shape, choice)
            image = image[:, rows, columns]
            if self._mean_file is not None and mean is not None:
                mean = mean[:, rows, columns]
        mirrored = self._mirror and bool(choice[2] % 2)
        self._scaled_difference(image, mean, out[..., ::-1] if mirrored else out)

    def _window(self, shape: tuple[int, ...], choice: Draws) -> tuple[slice, slice]:
        spare = (shape[1] - self._crop, shape[2] - self._crop)
        if self._train:
            top, left = int(choice[0]) % (spare[0] + 1), int(choice[1]) % (spare[1] + 1)
        else:
            top, left = spare[0] // 2, spare[1] // 2
        return slice(top, top + self._crop), slice(left, left + self._crop)

    def _scaled_difference(self, image: Array, mean: Floats | None, out: Floats) -> None:
        if mean is None:
            np.copyto(out, image)
        else:
            np.subtract(image, mean, out=out, dtype=np.float32)
        if self._scale != 1:
            np.multiply(out, self._scale, out=out)
