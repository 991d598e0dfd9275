"""Loading and preprocessing of images, and conversion between Caffe's messages and numpy.

Law: an image is (height, width, channels), float32 from 0 to 1, in RGB order, as in pycaffe.
`Transformer` converts it to the layout of a blob. Decoding and resizing are done by OpenCV.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.data.datum import decode
from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.proto.blob import blob_shape, from_array
from poseidon.caffe.proto.caffe_pb2 import BlobProto, BlobProtoVector, Datum
from poseidon.errors import DataError, UsageError, unknown

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
Image = NDArray[np.float32]
# The weights of red, green and blue in gray (ITU-R BT.709), as in scikit-image.
LUMA = np.array([0.2125, 0.7154, 0.0721], np.float32)
INTERPOLATIONS = {0: cv2.INTER_NEAREST, 1: cv2.INTER_LINEAR, 2: cv2.INTER_CUBIC, 3: cv2.INTER_CUBIC}
# OpenCV resizes at most this many channels at a time.
MOST_CHANNELS = 4


class WrongShape(DataError, ValueError):
    """The shape of an array is wrong for the conversion."""


def load_image(filename: str | os.PathLike[str], color: bool = True) -> Image:
    """Load an image file as (H, W, 3) in RGB order, or (H, W, 1) for `color=False`, with values
    from 0 to 1.

    Raises:
        DataError: the file is missing or not an image.
    """
    path = os.fspath(filename)
    if not os.path.isfile(path):
        raise DataError(f"there is no image {path}")
    stored = cv2.imread(path, cv2.IMREAD_UNCHANGED)
    if stored is None:
        raise DataError(f"{path} cannot be decoded as an image")
    largest = float(np.iinfo(np.dtype(stored.dtype.name)).max) if stored.dtype.kind in "ui" else 1.0
    image: Image = (stored.astype(np.float32) / largest).astype(np.float32)
    if image.ndim == 2:
        image = image[:, :, np.newaxis]
    if image.shape[2] >= 3:
        image = np.ascontiguousarray(image[:, :, 2::-1])
    if color:
        return np.tile(image[:, :, :1], (1, 1, 3)) if image.shape[2] < 3 else image
    return (image @ LUMA)[:, :, np.newaxis] if image.shape[2] >= 3 else image[:, :, :1]


def resize_image(im: Array, new_dims: Sequence[int], interp_order: int = 1) -> Image:
    """Resize an image (H, W, K).

    Args:
        im: the image, with any K.
        new_dims: (height, width).
        interp_order: 0 nearest, 1 linear, 2 or 3 cubic.

    Raises:
        UsageError: the order is not one of these.
        ValueError: the image has not three axes.
    """
    if interp_order not in INTERPOLATIONS:
        raise UsageError(f"interp_order {interp_order}: expected 0, 1, 2 or 3")
    _check_image(im)
    height, width = (int(side) for side in new_dims)
    source = np.ascontiguousarray(im, dtype=np.float32)
    parts = [source] if source.shape[2] <= MOST_CHANNELS else list(np.moveaxis(source, 2, 0))
    resized = [
        cv2.resize(
            np.ascontiguousarray(part), (width, height), interpolation=INTERPOLATIONS[interp_order]
        )
        for part in parts
    ]
    whole = resized[0] if len(resized) == 1 else np.stack(resized, axis=2)
    return np.asarray(whole, np.float32).reshape(height, width, source.shape[2])


def _check_image(im: Array) -> None:
    if np.ndim(im) != 3:
        raise WrongShape(
            f"an image has shape {np.shape(im)}, expected (H, W, K); for a gray one pass "
            "image[:, :, np.newaxis]"
        )


def oversample(images: Sequence[Array] | Array, crop_dims: Sequence[int]) -> Image:
    """Return ten crops of each image: the four corners and the center, then their mirror images.

    Args:
        images: images (H, W, K) of the same size.
        crop_dims: (height, width) of a crop.

    Returns:
        an array (10 N, height, width, K).
    """
    height, width, channels = images[0].shape
    rows, columns = (int(side) for side in crop_dims)
    corners = [(top, left) for top in (0, height - rows) for left in (0, width - columns)]
    corners.append((int(height / 2.0 - rows / 2.0), int(width / 2.0 - columns / 2.0)))
    crops = np.empty((len(images), 2, len(corners), rows, columns, channels), np.float32)
    for number, image in enumerate(images):
        for position, (top, left) in enumerate(corners):
            crop = image[top : top + rows, left : left + columns]
            crops[number, 0, position] = crop
            crops[number, 1, position] = crop[:, ::-1]
    return crops.reshape(-1, rows, columns, channels)


class Transformer:
    """The preprocessing of a net's inputs: order of axes and channels, scale, mean.

    Args:
        inputs: the shape (N, K, H, W) of each input by name.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, tuple[int, ...]] = {}
        self.channel_swap: dict[str, tuple[int, ...]] = {}
        self.raw_scale: dict[str, float | None] = {}
        self.mean: dict[str, Array] = {}
        self.input_scale: dict[str, float | None] = {}

    def preprocess(self, in_: str, data: Array) -> Image:
        """Convert an image to an input: resize, transpose, swap channels, raw_scale, subtract
        the mean, input_scale.
        """
        self._check(in_)
        result = np.array(data, dtype=np.float32)
        size = self.inputs[in_][2:]
        if result.shape[:2] != size:
            result = resize_image(result, size)
        if in_ in self.transpose:
            _check_image(result)
            result = result.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            result = result[list(self.channel_swap[in_])]
        if (scale := self.raw_scale.get(in_)) is not None:
            result *= scale
        if in_ in self.mean:
            result -= self.mean[in_]
        if (scale := self.input_scale.get(in_)) is not None:
            result *= scale
        return result

    def deprocess(self, in_: str, data: Array) -> Array:
        """Convert an input back to an image, the inverse of `preprocess` except for the size."""
        self._check(in_)
        result = np.array(data, copy=True).squeeze()
        if (scale := self.input_scale.get(in_)) is not None:
            result /= scale
        if in_ in self.mean:
            result += self.mean[in_]
        if (scale := self.raw_scale.get(in_)) is not None:
            result /= scale
        if in_ in self.channel_swap:
            result = result[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            result = result.transpose(np.argsort(self.transpose[in_]).tolist())
        return result

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of axes in the blob: (2, 0, 1) converts (H, W, K) to (K, H, W)."""
        self._check(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise UsageError(f"transpose {tuple(order)}: expected {len(self.inputs[in_]) - 1} axes")
        self.transpose[in_] = tuple(order)

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of channels in the blob: (2, 1, 0) converts RGB to BGR."""
        self._check(in_)
        if len(order) != self.inputs[in_][1]:
            raise UsageError(
                f"channel swap {tuple(order)}: expected {self.inputs[in_][1]} channels"
            )
        self.channel_swap[in_] = tuple(order)

    def set_raw_scale(self, in_: str, scale: float | None) -> None:
        """Set the factor that is applied before the mean is subtracted: 255 for most nets; None: 1."""
        self._check(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: Array) -> None:
        """Set the mean to subtract: one value per channel, or a mean image (K, H, W), which is
        resized if needed.

        Raises:
            ValueError: the mean has a different number of channels, or a wrong shape.
        """
        self._check(in_)
        mean, wanted = np.asarray(mean), self.inputs[in_][1:]
        if mean.ndim == 1:
            if mean.shape[0] != wanted[0]:
                raise WrongShape(f"the mean has {mean.shape[0]} channels, expected {wanted[0]}")
            self.mean[in_] = mean[:, np.newaxis, np.newaxis]
            return
        image = mean[np.newaxis] if mean.ndim == 2 else mean
        if image.ndim != 3:
            raise WrongShape(f"the mean has shape {mean.shape}, expected (K,) or (K, H, W)")
        if image.shape != wanted:
            image = resize_image(image.transpose(1, 2, 0), wanted[1:]).transpose(2, 0, 1)
        self.mean[in_] = image

    def set_input_scale(self, in_: str, scale: float | None) -> None:
        """Set the factor that is applied after the mean is subtracted; None: 1."""
        self._check(in_)
        self.input_scale[in_] = scale

    def _check(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise UsageError(unknown("input", in_, self.inputs))


def blobproto_to_array(blob: BlobProto, return_diff: bool = False) -> Array:
    """Convert a blob, or its diff, to an array.

    Raises:
        ValueError: the shape does not match the number of values.
    """
    single, double = (blob.diff, blob.double_diff) if return_diff else (blob.data, blob.double_data)
    return np.array(double if len(double) else single, dtype=np.float64).reshape(blob_shape(blob))


def array_to_blobproto(arr: Array, diff: Array | None = None) -> BlobProto:
    """Convert an array, and optionally its diff, to a blob."""
    blob = from_array(arr)
    if diff is not None:
        blob.diff.extend(np.asarray(diff, np.float32).ravel().tolist())
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[Array]) -> bytes:
    """Serialize arrays as a BlobProtoVector."""
    return BlobProtoVector(
        blobs=[array_to_blobproto(array) for array in arraylist]
    ).SerializeToString()


def blobprotovector_str_to_arraylist(text: bytes) -> list[Array]:
    """Parse a serialized BlobProtoVector to arrays."""
    return [blobproto_to_array(blob) for blob in BlobProtoVector.FromString(text).blobs]


def array_to_datum(arr: Array, label: int | None = None) -> Datum:
    """Convert an array (C, H, W) to a Datum: uint8 is stored in `data`, every other type in
    `float_data`.

    Raises:
        ValueError: the array does not have three axes.
    """
    if arr.ndim != 3:
        raise WrongShape(f"an array of shape {arr.shape} cannot be a Datum; expected (C, H, W)")
    channels, height, width = arr.shape
    datum = Datum(channels=channels, height=height, width=width)
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(np.float32).ravel().tolist())
    if label is not None:
        datum.label = label
    return datum


def datum_to_array(datum: Datum) -> Array:
    """Convert a Datum, which may be encoded, to an array (C, H, W) of uint8 or float.

    Raises:
        DataError: the sizes contradict each other, or the image cannot be decoded.
    """
    array, _ = decode(datum.SerializeToString())
    return array.copy() if array.dtype == np.uint8 else array.astype(np.float64)
