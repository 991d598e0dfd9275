"""Caffe's Datum: one labelled picture (or float array) as a database record.

Law: an array is (channels, height, width), and colours lie in Caffe's order, blue first, whether the record is
raw or encoded. Every record is checked against its own header before it is used.

Source: caffe/util/io.cpp (DecodeDatum, CVMatToDatum) for what an encoded Datum means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from poseidon.data.batches.claimed_size import check_claim
from poseidon.errors import DataError
from poseidon.proto.caffe_pb2 import Datum

Array = npt.NDArray[Any]

# Field numbers of the schema with their wire types, for `RawLayout`.
DATA_TAG = b"\x22"  # data = 4, length-delimited
LABEL_TAG = b"\x28"  # label = 5, varint
NOT_ENCODED = b"\x38\x00"  # encoded = 7, varint 0


class Decoding(Enum):
    """How many channels an encoded picture becomes."""

    AS_STORED = auto()
    """As many as the file has: 1 for grey, 3 for colour, 4 with transparency."""
    COLOR = auto()
    """Three, whatever the file has."""
    GRAY = auto()
    """One, whatever the file has."""


# How OpenCV is told; it puts blue first by itself.
FLAGS = {
    Decoding.AS_STORED: cv2.IMREAD_UNCHANGED,
    Decoding.COLOR: cv2.IMREAD_COLOR,
    Decoding.GRAY: cv2.IMREAD_GRAYSCALE,
}


def decode(
    record: bytes | memoryview, decoding: Decoding = Decoding.AS_STORED
) -> tuple[npt.NDArray[np.uint8] | npt.NDArray[np.float32], int]:
    """Array and label of a record.

    Args:
        record: a serialized Datum: raw uint8 `data`, `float_data`, or an encoded picture (JPEG, PNG, ...).
        decoding: concerns encoded pictures only.

    Returns:
        the array (C, H, W), uint8 or float32, not to be written to; and the label, 0 when there is none.

    Raises:
        DataError: not a Datum, sizes that contradict each other, or a picture that cannot be decoded. The text
            names no place: the caller adds key and database.
    """
    datum = _parse(record)
    if datum.encoded:
        return _decode_picture(datum.data, decoding), datum.label
    shape = (datum.channels, datum.height, datum.width)
    count = _checked_count(shape)
    if datum.data:
        if len(datum.data) != count:
            raise DataError(f"the Datum holds {len(datum.data)} bytes, but {_product(shape)} = {count}")
        return np.frombuffer(datum.data, np.uint8).reshape(shape), datum.label
    if len(datum.float_data) != count:
        raise DataError(f"the Datum holds {len(datum.float_data)} floats, but {_product(shape)} = {count}")
    return np.array(datum.float_data, np.float32).reshape(shape), datum.label


def encode_datum(array: Array, label: int) -> bytes:
    """Return a serialized raw Datum: uint8 arrays (C, H, W) go to `data`, every other type to `float_data`."""
    channels, height, width = array.shape
    datum = Datum(channels=channels, height=height, width=width, label=label)
    if array.dtype == np.uint8:
        datum.data = array.tobytes()
    else:
        datum.float_data.extend(array.astype(np.float32).ravel().tolist())
    return datum.SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLayout:
    """Where pixels and label lie in raw uint8 records of one shape, so that they need no parsing.

    Databases hold records that differ in nothing but pixels and label; of such a record the bytes before the
    pixels are always the same, and what follows them is the label.
    """

    shape: tuple[int, int, int]
    head: bytes
    end: int
    """Offset of the first byte after the pixels."""

    @staticmethod
    def of(record: bytes | memoryview) -> RawLayout | None:
        """Return the layout of `record`, or None when it is float, encoded or laid out in another order."""
        datum = _parse(record)
        shape = (datum.channels, datum.height, datum.width)
        if datum.encoded or not datum.data or min(shape) < 1 or len(datum.data) != int(np.prod(shape)):
            return None
        header = Datum(channels=shape[0], height=shape[1], width=shape[2]).SerializeToString()
        head = header + DATA_TAG + _varint(len(datum.data))
        layout = RawLayout(shape=shape, head=head, end=len(head) + len(datum.data))
        if not layout.matches(record) or layout.pixels(record) != datum.data:
            return None
        return layout if layout.label(bytes(record[layout.end :])) == datum.label else None

    def matches(self, record: bytes | memoryview) -> bool:
        """Return whether the bytes before the pixels are as expected."""
        return record[: len(self.head)] == self.head and len(record) >= self.end

    def pixels(self, record: bytes | memoryview) -> bytes | memoryview:
        """Return the C*H*W bytes of a record that `matches`."""
        return record[len(self.head) : self.end]

    def label(self, tail: bytes) -> int | None:
        """Return the label that the bytes after the pixels spell, or None when they spell anything more."""
        rest = tail.removesuffix(NOT_ENCODED)
        if not rest:
            return 0
        if rest[:1] != LABEL_TAG:
            return None
        number = 0
        for place, byte in enumerate(rest[1:]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                # Longer, or negative (ten bytes): left to the general parser.
                return number if place + 2 == len(rest) and number < 1 << 31 else None
        return None


def _varint(number: int) -> bytes:
    spelled = bytearray()
    while number >= 0x80:
        spelled.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*spelled, number])


def _parse(record: bytes | memoryview) -> Datum:
    try:
        return Datum.FromString(bytes(record))
    except DecodeError as error:
        raise DataError("the record is not a Datum") from error


def _product(shape: tuple[int, int, int]) -> str:
    return "channels {} x height {} x width {}".format(*shape)


def _checked_count(shape: tuple[int, int, int]) -> int:
    if min(shape) < 1:
        raise DataError(f"the record is not a Datum with a picture: it says {_product(shape)}")
    return shape[0] * shape[1] * shape[2]


def _decode_picture(encoded: bytes, decoding: Decoding) -> npt.NDArray[np.uint8]:
    check_claim(encoded)
    try:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), FLAGS[decoding])
    except cv2.error as error:
        raise DataError(f"the encoded picture cannot be decoded: {error.err}") from error
    if pixels is None:
        raise DataError("the encoded picture cannot be decoded: it is damaged, or of an unknown format")
    if pixels.dtype != np.uint8:
        raise DataError("the encoded picture has more than 8 bits a channel")
    if pixels.ndim == 2:
        return pixels[np.newaxis]  # type: ignore[return-value]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
