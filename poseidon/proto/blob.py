"""BlobProto to array and back.

Law: an array that leaves here has as many numbers as its shape says, in float32 and C order, and
owns its memory. Both ways move whole blocks of memory, never single numbers: a model has 10^8.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from poseidon.proto.caffe_pb2 import BlobProto

# Wire tag of BlobProto.data: field 5, length-delimited (packed).
_DATA_TAG = bytes([5 << 3 | 2])
_DIFF_TAG = bytes([6 << 3 | 2])


def to_array(blob: BlobProto) -> npt.NDArray[np.float32]:
    """The numbers of a blob in its shape.

    As Caffe's Blob::FromProto: a blob with any of num, channels, height, width is 4-D by these, else
    `shape` holds (none at all is a single number, 0-D); double_data goes before data.

    Raises:
        ValueError: the shape has a negative side, or does not fit the count of numbers.
    """
    shape = blob_shape(blob)
    numbers = blob.double_data if len(blob.double_data) else blob.data
    if len(numbers) != math.prod(shape):
        raise ValueError(f"blob of shape {shape} has {len(numbers)} numbers, expected {math.prod(shape)}")
    # protobuf hands its memory over whole through __array__.
    return np.array(numbers, dtype=np.float32).reshape(shape)


def blob_shape(blob: BlobProto) -> tuple[int, ...]:
    """The shape that a blob states, in its old or its new form.

    Raises:
        ValueError: a side is negative.
    """
    if any(blob.HasField(side) for side in ("num", "channels", "height", "width")):
        shape: tuple[int, ...] = (blob.num, blob.channels, blob.height, blob.width)
    else:
        shape = tuple(blob.shape.dim)
    if any(side < 0 for side in shape):
        raise ValueError(f"blob shape {shape} has a negative side")
    return shape


def only_diff(array: npt.ArrayLike) -> BlobProto:
    """A blob that has nothing but a diff, to be merged into one with data."""
    return BlobProto.FromString(_packed(_DIFF_TAG, np.ascontiguousarray(array, dtype="<f4")))


def _packed(tag: bytes, numbers: npt.NDArray[np.float32]) -> bytes:
    return tag + _varint(numbers.nbytes) + numbers.tobytes() if numbers.size else b""


def from_array(array: npt.ArrayLike) -> BlobProto:
    """A blob of `array`: its shape in the new form, its numbers as float32 in C order."""
    numbers = np.ascontiguousarray(array, dtype="<f4")
    blob = BlobProto()
    blob.shape.dim.extend(np.shape(array))
    # As wire bytes: filling `data` number by number takes 100 times as long.
    blob.MergeFromString(_packed(_DATA_TAG, numbers))
    return blob


def _varint(value: int) -> bytes:
    """protobuf's base-128 form of a count: low digits first, the high bit set on all but the last."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
