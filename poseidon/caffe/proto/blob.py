"""Conversion between BlobProto and numpy arrays.

Law: an array has as many elements as its shape says, in float32 and C order, and owns its memory.
Both directions copy whole blocks of memory, not single numbers: a model has 10^8.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from poseidon.caffe.proto.caffe_pb2 import BlobProto

# Wire tag of BlobProto.data: field 5, length-delimited (packed).
_DATA_TAG = bytes([5 << 3 | 2])
_DIFF_TAG = bytes([6 << 3 | 2])


def to_array(blob: BlobProto) -> npt.NDArray[np.float32]:
    """Return the values of a blob as an array of its shape.

    As Caffe's Blob::FromProto: a blob with any of num, channels, height, width is 4-D with these
    extents, else `shape` counts (an empty one is a scalar, 0-D). double_data takes precedence over
    data.

    Raises:
        ValueError: the shape has a negative extent, or does not match the number of values.
    """
    shape = blob_shape(blob)
    numbers = blob.double_data if len(blob.double_data) else blob.data
    if len(numbers) != math.prod(shape):
        raise ValueError(
            f"blob of shape {shape} has {len(numbers)} values, expected {math.prod(shape)}"
        )
    # protobuf exports its memory in one piece through __array__.
    return np.array(numbers, dtype=np.float32).reshape(shape)


def blob_shape(blob: BlobProto) -> tuple[int, ...]:
    """Return the shape of a blob, from `shape` or from the legacy num, channels, height and width.

    Raises:
        ValueError: an extent is negative.
    """
    if any(blob.HasField(extent) for extent in ("num", "channels", "height", "width")):
        shape: tuple[int, ...] = (blob.num, blob.channels, blob.height, blob.width)
    else:
        shape = tuple(blob.shape.dim)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"blob shape {shape} has a negative extent")
    return shape


def only_diff(array: npt.ArrayLike) -> BlobProto:
    """Return a blob with only a diff, to be merged into one with data."""
    return BlobProto.FromString(packed(_DIFF_TAG, np.ascontiguousarray(array, dtype="<f4")))


def packed(tag: bytes, numbers: npt.NDArray[np.floating]) -> bytes:
    """Return the wire bytes of a packed field of floats or doubles with this tag."""
    return tag + varint(numbers.nbytes) + numbers.tobytes() if numbers.size else b""


def from_array(array: npt.ArrayLike) -> BlobProto:
    """Return a blob with the values of `array` as float32 in C order, and its shape in `shape`."""
    numbers = np.ascontiguousarray(array, dtype="<f4")
    blob = BlobProto()
    blob.shape.dim.extend(np.shape(array))
    # Written as wire bytes: appending to `data` number by number takes 100 times as long.
    blob.MergeFromString(packed(_DATA_TAG, numbers))
    return blob


def varint(value: int) -> bytes:
    """Encode a count as a protobuf varint: base 128, low digits first, the high bit set on all
    but the last.
    """
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
