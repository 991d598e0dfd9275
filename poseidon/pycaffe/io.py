"""Pictures for nets: loading, resizing, cropping, and what a net wants its input to be.

Law: a picture here is (height, width, channels), float32 from 0 to 1, colours red first, as pycaffe has it; `Transformer`
makes of it what a blob holds. Decoding and resizing are OpenCV's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from poseidon.errors import DataError, UsageError, unknown
from poseidon.proto import caffe_pb2
from poseidon.pycaffe.messages import (
    WrongShape,
    array_to_blobproto,
    array_to_datum,
    arraylist_to_blobprotovector_str,
    blobproto_to_array,
    blobprotovector_str_to_arraylist,
    datum_to_array,
)

__all__ = [
    "Transformer",
    "array_to_blobproto",
    "array_to_datum",
    "arraylist_to_blobprotovector_str",
    "blobproto_to_array",
    "blobprotovector_str_to_arraylist",
    "caffe_pb2",
    "datum_to_array",
    "load_image",
    "oversample",
    "resize_image",
]

Array = NDArray[Any]
Picture = NDArray[np.float32]
# Red, green, blue in grey (ITU-R BT.709), as scikit-image has them.
LUMA = np.array([0.2125, 0.7154, 0.0721], np.float32)
INTERPOLATIONS = {0: cv2.INTER_NEAREST, 1: cv2.INTER_LINEAR, 2: cv2.INTER_CUBIC, 3: cv2.INTER_CUBIC}
# OpenCV resizes more channels than these one by one.
MOST_CHANNELS = 4


def load_image(filename: str | os.PathLike[str], color: bool = True) -> Picture:
    """Return a picture file as (H, W, 3), or (H, W, 1) for `color=False`, from 0 to 1, red first.

    Raises:
        DataError: the file is missing, or no picture.
    """
    path = os.fspath(filename)
    if not os.path.isfile(path):
        raise DataError(f"there is no picture {path}")
    stored = cv2.imread(path, cv2.IMREAD_UNCHANGED)
    if stored is None:
        raise DataError(f"{path} cannot be decoded as a picture")
    largest = float(np.iinfo(np.dtype(stored.dtype.name)).max) if stored.dtype.kind in "ui" else 1.0
    picture: Picture = (stored.astype(np.float32) / largest).astype(np.float32)
    if picture.ndim == 2:
        picture = picture[:, :, np.newaxis]
    if picture.shape[2] >= 3:
        picture = np.ascontiguousarray(picture[:, :, 2::-1])
    if color:
        return np.tile(picture[:, :, :1], (1, 1, 3)) if picture.shape[2] < 3 else picture
    return (picture @ LUMA)[:, :, np.newaxis] if picture.shape[2] >= 3 else picture[:, :, :1]


def resize_image(im: Array, new_dims: Sequence[int], interp_order: int = 1) -> Picture:
    """Return a picture (H, W, K) of another size.

    Args:
        im: the picture; any K.
        new_dims: (height, width).
        interp_order: 0 nearest, 1 linear, 2 or 3 cubic.

    Raises:
        UsageError: another order.
    """
    if interp_order not in INTERPOLATIONS:
        raise UsageError(f"interp_order {interp_order}: expected 0, 1, 2 or 3")
    height, width = (int(side) for side in new_dims)
    source = np.ascontiguousarray(im, dtype=np.float32)
    parts = [source] if source.shape[2] <= MOST_CHANNELS else list(np.moveaxis(source, 2, 0))
    resized = [
        cv2.resize(np.ascontiguousarray(part), (width, height), interpolation=INTERPOLATIONS[interp_order])
        for part in parts
    ]
    whole = resized[0] if len(resized) == 1 else np.stack(resized, axis=2)
    return np.asarray(whole, np.float32).reshape(height, width, source.shape[2])


def oversample(images: Sequence[Array] | Array, crop_dims: Sequence[int]) -> Picture:
    """Ten crops of each picture: four corners and the centre, then the mirrors of these.

    Args:
        images: pictures (H, W, K), all of one size.
        crop_dims: (height, width) of a crop.

    Returns:
        (10 N, height, width, K).
    """
    height, width, channels = images[0].shape
    rows, columns = (int(side) for side in crop_dims)
    places = [(top, left) for top in (0, height - rows) for left in (0, width - columns)]
    places.append((int(height / 2.0 - rows / 2.0), int(width / 2.0 - columns / 2.0)))
    crops = np.empty((len(images), 2, len(places), rows, columns, channels), np.float32)
    for number, image in enumerate(images):
        for place, (top, left) in enumerate(places):
            crop = image[top : top + rows, left : left + columns]
            crops[number, 0, place] = crop
            crops[number, 1, place] = crop[:, ::-1]
    return crops.reshape(-1, rows, columns, channels)


class Transformer:
    """What each input of a net wants: order of axes and channels, scale, mean.

    Args:
        inputs: shape (N, K, H, W) of each input by name.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, tuple[int, ...]] = {}
        self.channel_swap: dict[str, tuple[int, ...]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, Array] = {}
        self.input_scale: dict[str, float] = {}

    def preprocess(self, in_: str, data: Array) -> Picture:
        """Return a picture as the input's blob holds it: resized, transposed, channels swapped, scaled, mean taken off, scaled."""
        self._check(in_)
        made = np.array(data, dtype=np.float32)
        size = self.inputs[in_][2:]
        if made.shape[:2] != size:
            made = resize_image(made, size)
        if in_ in self.transpose:
            made = made.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            made = made[list(self.channel_swap[in_])]
        if in_ in self.raw_scale:
            made *= self.raw_scale[in_]
        if in_ in self.mean:
            made -= self.mean[in_]
        if in_ in self.input_scale:
            made *= self.input_scale[in_]
        return made

    def deprocess(self, in_: str, data: Array) -> Array:
        """Return the picture behind what the blob holds: `preprocess` backwards, but for the size."""
        self._check(in_)
        made = np.array(data, copy=True).squeeze()
        if in_ in self.input_scale:
            made /= self.input_scale[in_]
        if in_ in self.mean:
            made += self.mean[in_]
        if in_ in self.raw_scale:
            made /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            made = made[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            made = made.transpose(np.argsort(self.transpose[in_]).tolist())
        return made

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """The order of a picture's axes in the blob: (2, 0, 1) makes (K, H, W) of (H, W, K)."""
        self._check(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise UsageError(f"transpose {tuple(order)}: expected {len(self.inputs[in_]) - 1} axes")
        self.transpose[in_] = tuple(order)

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """The order of channels in the blob: (2, 1, 0) puts blue first."""
        self._check(in_)
        if len(order) != self.inputs[in_][1]:
            raise UsageError(f"channel swap {tuple(order)}: expected {self.inputs[in_][1]} channels")
        self.channel_swap[in_] = tuple(order)

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """What values are multiplied by before the mean is taken off: 255 for most nets."""
        self._check(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: Array) -> None:
        """What is taken off: one number a channel, or a mean picture (K, H, W), resized if need be.

        Raises:
            ValueError: the mean has other channels, or a shape that is neither.
        """
        self._check(in_)
        wanted = self.inputs[in_][1:]
        if mean.ndim == 1:
            if mean.shape[0] != wanted[0]:
                raise WrongShape(f"the mean has {mean.shape[0]} channels, expected {wanted[0]}")
            self.mean[in_] = mean[:, np.newaxis, np.newaxis]
            return
        picture = mean[np.newaxis] if mean.ndim == 2 else mean
        if picture.ndim != 3:
            raise WrongShape(f"the mean has shape {mean.shape}, expected (K,) or (K, H, W)")
        if picture.shape != wanted:
            picture = resize_image(picture.transpose(1, 2, 0), wanted[1:]).transpose(2, 0, 1)
        self.mean[in_] = picture

    def set_input_scale(self, in_: str, scale: float) -> None:
        """What values are multiplied by after the mean is taken off."""
        self._check(in_)
        self.input_scale[in_] = scale

    def _check(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise UsageError(unknown("input", in_, self.inputs))
