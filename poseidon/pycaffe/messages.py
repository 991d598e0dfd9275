"""Blobs and Datums between Caffe's messages and numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.data.datum import decode
from poseidon.errors import DataError
from poseidon.proto.blob import blob_shape, from_array
from poseidon.proto.caffe_pb2 import BlobProto, BlobProtoVector, Datum

Array = NDArray[Any]


class WrongShape(DataError, ValueError):
    """An array has another shape than what it is to become."""


def blobproto_to_array(blob: BlobProto, return_diff: bool = False) -> Array:
    """Return the numbers of a blob, or its gradient, in its shape.

    Raises:
        ValueError: the shape does not fit the count of numbers.
    """
    single, double = (blob.diff, blob.double_diff) if return_diff else (blob.data, blob.double_data)
    return np.array(double if len(double) else single, dtype=np.float64).reshape(blob_shape(blob))


def array_to_blobproto(arr: Array, diff: Array | None = None) -> BlobProto:
    """Return a blob of an array, and of its gradient if given."""
    blob = from_array(arr)
    if diff is not None:
        blob.diff.extend(np.asarray(diff, np.float32).ravel().tolist())
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[Array]) -> bytes:
    """Arrays as a serialized BlobProtoVector."""
    return BlobProtoVector(blobs=[array_to_blobproto(array) for array in arraylist]).SerializeToString()


def blobprotovector_str_to_arraylist(text: bytes) -> list[Array]:
    """Return the arrays of a serialized BlobProtoVector."""
    return [blobproto_to_array(blob) for blob in BlobProtoVector.FromString(text).blobs]


def array_to_datum(arr: Array, label: int | None = None) -> Datum:
    """Return a Datum of an array (C, H, W): uint8 goes to `data`, every other type to `float_data`.

    Raises:
        ValueError: the array has not three axes.
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
    """Return the array (C, H, W) of a Datum, an encoded one decoded: uint8, or float.

    Raises:
        DataError: its sizes contradict each other, or its picture cannot be decoded.
    """
    array, _ = decode(datum.SerializeToString())
    return array.copy() if array.dtype == np.uint8 else array.astype(np.float64)
