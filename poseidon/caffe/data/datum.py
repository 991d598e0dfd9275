"""The records of databases: Datum, a labelled image or float array; SSD's AnnotatedDatum, an image
with its objects; and label maps.

Law: an array is (channels, height, width) with channels in Caffe's order, BGR, whether the record
is raw or encoded. Every record is checked against its own header before it is used.

Source: caffe/util/io.cpp (DecodeDatum, CVMatToDatum).

SSD's AnnotatedDatum: an image with its objects as a database record.

Law: every record is checked before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from poseidon.base.paths import own_command
from poseidon.caffe.data.batches.claimed_size import check_claim
from poseidon.caffe.data.boxes import Box, Object
from poseidon.caffe.proto.blob import varint
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum, Datum, LabelMap
from poseidon.caffe.proto.text import parse, read_text
from poseidon.errors import DataError, PoseidonError

Array = npt.NDArray[Any]

# Field numbers of the schema with their wire types, for `RawLayout`.
DATA_TAG = b"\x22"  # data = 4, length-delimited
LABEL_TAG = b"\x28"  # label = 5, varint
NOT_ENCODED = b"\x38\x00"  # encoded = 7, varint 0


class Decoding(Enum):
    """The number of channels that an encoded image is decoded to."""

    AS_STORED = auto()
    """As many as the file has: 1 for gray, 3 for color, 4 with transparency."""
    COLOR = auto()
    """Three."""
    GRAY = auto()
    """One."""


# OpenCV's flags. It decodes to BGR.
FLAGS = {
    Decoding.AS_STORED: cv2.IMREAD_UNCHANGED,
    Decoding.COLOR: cv2.IMREAD_COLOR,
    Decoding.GRAY: cv2.IMREAD_GRAYSCALE,
}


def decode(
    record: bytes | memoryview, decoding: Decoding = Decoding.AS_STORED
) -> tuple[npt.NDArray[np.uint8] | npt.NDArray[np.float32], int]:
    """Decode a record to an array and a label.

    Args:
        record: a serialized Datum: raw uint8 `data`, `float_data`, or an encoded image (JPEG, PNG,
            ...).
        decoding: the channels of encoded images.

    Returns:
        the array (C, H, W), uint8 or float32, read-only; and the label, 0 if there is none.

    Raises:
        DataError: the record is not a Datum, its sizes contradict each other, or the image cannot
            be decoded. The caller adds the key and the database to the text.
    """
    datum = _parse(record)
    if datum.encoded:
        return decode_image(datum.data, decoding), datum.label
    shape = (datum.channels, datum.height, datum.width)
    count = _checked_count(shape)
    if datum.data:
        if len(datum.data) != count:
            raise DataError(
                f"the Datum holds {len(datum.data)} bytes, but {_product(shape)} = {count}"
            )
        return np.frombuffer(datum.data, np.uint8).reshape(shape), datum.label
    if len(datum.float_data) != count:
        raise DataError(
            f"the Datum holds {len(datum.float_data)} floats, but {_product(shape)} = {count}"
        )
    return np.array(datum.float_data, np.float32).reshape(shape), datum.label


def is_datum(record: bytes | memoryview) -> bool:
    """Return whether a record is a Datum that can be decoded."""
    try:
        decode(record)
    except DataError:
        return False
    return True


def encode_datum(array: Array, label: int) -> bytes:
    """Return a serialized raw Datum of an array (C, H, W): uint8 is stored in
    `data`, every other type in `float_data`.
    """
    channels, height, width = array.shape
    datum = Datum(channels=channels, height=height, width=width, label=label)
    if array.dtype == np.uint8:
        datum.data = array.tobytes()
    else:
        datum.float_data.extend(array.astype(np.float32).ravel().tolist())
    return datum.SerializeToString()


def encode_file(content: bytes, label: int) -> bytes:
    """Return a serialized Datum with the content of an image file."""
    return Datum(data=content, label=label, encoded=True).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLayout:
    """The offsets of pixels and label in raw uint8 records of one shape, without protobuf.

    The records of a database usually differ only in pixels and label. Then the bytes before the
    pixels are always the same, and the label follows the pixels.
    """

    shape: tuple[int, int, int]
    head: bytes
    end: int
    """Offset of the first byte after the pixels."""

    @staticmethod
    def of(record: bytes | memoryview) -> RawLayout | None:
        """Return the layout of `record`, or None if it is float, encoded or has its fields in
        a different order.
        """
        datum = _parse(record)
        shape = (datum.channels, datum.height, datum.width)
        if (
            datum.encoded
            or not datum.data
            or min(shape) < 1
            or len(datum.data) != int(np.prod(shape))
        ):
            return None
        header = Datum(channels=shape[0], height=shape[1], width=shape[2]).SerializeToString()
        head = header + DATA_TAG + varint(len(datum.data))
        layout = RawLayout(shape=shape, head=head, end=len(head) + len(datum.data))
        if not layout.matches(record) or layout.pixels(record) != datum.data:
            return None
        return layout if layout.label(bytes(record[layout.end :])) == datum.label else None

    def matches(self, record: bytes | memoryview) -> bool:
        """Return whether a record has this layout: the same bytes before the pixels, and enough
        of them.
        """
        return record[: len(self.head)] == self.head and len(record) >= self.end

    def pixels(self, record: bytes | memoryview) -> bytes | memoryview:
        """Return the C*H*W bytes of a record that `matches`."""
        return record[len(self.head) : self.end]

    def label(self, tail: bytes) -> int | None:
        """Return the label in the bytes after the pixels, or None if they hold any other field."""
        rest = tail.removesuffix(NOT_ENCODED)
        if not rest:
            return 0
        if rest[:1] != LABEL_TAG:
            return None
        number = 0
        for index, byte in enumerate(rest[1:]):
            number |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                # A longer tail or a negative number (ten bytes) is left to the general parser.
                return number if index + 2 == len(rest) and number < 1 << 31 else None
        return None


def _parse(record: bytes | memoryview) -> Datum:
    try:
        return Datum.FromString(bytes(record))
    except DecodeError as error:
        raise DataError("the record is not a Datum") from error


def _product(shape: tuple[int, int, int]) -> str:
    return "channels {} x height {} x width {}".format(*shape)


def _checked_count(shape: tuple[int, int, int]) -> int:
    if min(shape) < 1:
        raise DataError(f"the record is not a Datum with an image: it has {_product(shape)}")
    return shape[0] * shape[1] * shape[2]


def decode_image(encoded: bytes, decoding: Decoding) -> npt.NDArray[np.uint8]:
    """Return an image of a file format as an array (C, H, W), channels in BGR order.

    Raises:
        DataError: it is damaged, of an unknown format, or has more than 8 bits a channel.
    """
    check_claim(encoded)
    try:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), FLAGS[decoding])
    except cv2.error as error:
        raise DataError(f"the encoded image cannot be decoded: {error.err}") from error
    if pixels is None:
        raise DataError(
            "the encoded image cannot be decoded: it is damaged, or of an unknown format"
        )
    if pixels.dtype != np.uint8:
        raise DataError("the encoded image has more than 8 bits a channel")
    if pixels.ndim == 2:
        return pixels[np.newaxis]  # type: ignore[return-value]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class AnnotatedImage(NamedTuple):
    """A decoded record.

    Attributes:
        image: (C, H, W), read-only.
        objects: the objects; None if the record has no annotation type.
    """

    image: npt.NDArray[Any]
    label: int
    objects: list[Object] | None


def decode_annotated(record: bytes | memoryview, decoding: Decoding) -> AnnotatedImage:
    """Decode a record.

    Raises:
        DataError: the record is not an AnnotatedDatum, has a box that is not finite, or its image
            cannot be decoded. The caller adds the key and the database to the text.
    """
    datum = AnnotatedDatum()
    try:
        datum.ParseFromString(bytes(record))
    except DecodeError as error:
        raise DataError("the record is not an AnnotatedDatum") from error
    if not datum.HasField("datum"):
        raise DataError(
            "the record is not an AnnotatedDatum: it has no image; create the database with "
            f"{own_command()} convert_annoset"
        )
    image, label = decode(datum.datum.SerializeToString(), decoding)
    if not datum.HasField("type"):
        return AnnotatedImage(image, label, None)
    objects = [
        Object(group.group_label, item.instance_id, _box(item.bbox), item.bbox.difficult)
        for group in datum.annotation_group
        for item in group.annotation
    ]
    return AnnotatedImage(image, label, objects)


def _box(bbox: Any) -> Box:
    box = Box(bbox.xmin, bbox.ymin, bbox.xmax, bbox.ymax)
    if not all(map(math.isfinite, box)):
        raise DataError(f"the record has a box {tuple(box)}, expected finite numbers")
    return box


def encode_annotated(datum: Datum, objects: Sequence[Object]) -> bytes:
    """Return a serialized AnnotatedDatum of an image and its objects, grouped
    by their labels in order of appearance.
    """
    annotated = AnnotatedDatum(datum=datum, type=AnnotatedDatum.BBOX)
    groups: dict[int, Any] = {}
    for item in objects:
        if item.label not in groups:
            groups[item.label] = annotated.annotation_group.add(group_label=item.label)
        entry = groups[item.label].annotation.add(instance_id=item.instance)
        entry.bbox.xmin, entry.bbox.ymin, entry.bbox.xmax, entry.bbox.ymax = item.box
        entry.bbox.difficult = item.difficult
    return annotated.SerializeToString()


def object_rows(objects: Sequence[Sequence[Object]]) -> npt.NDArray[np.float32]:
    """Return the objects of a batch as (1, 1, G, 8): image, label, instance, xmin, ymin, xmax,
    ymax, difficult.

    Without any object there is one row of -1.
    """
    rows: list[tuple[float, ...]] = [
        (image, item.label, item.instance, *item.box, item.difficult)
        for image, own in enumerate(objects)
        for item in own
    ]
    return np.array(rows or [(-1.0,) * 8], np.float32)[np.newaxis, np.newaxis]


def read_label_map(path: Path) -> LabelMap:
    """Read a label map.

    Raises:
        DataError: the file cannot be read or parsed, or is empty.
    """
    try:
        found = parse(read_text(path), LabelMap(), source=str(path))
    except PoseidonError as error:
        raise DataError(f"cannot read the label map {error}") from error
    if not found.item:
        raise DataError(f"the label map {path} has no item")
    return found


def names_of(labels: LabelMap) -> dict[int, str]:
    return {item.label: item.name for item in labels.item}


def labels_of(labels: LabelMap) -> dict[str, int]:
    """Return the label of each name."""
    return {item.name: item.label for item in labels.item}


def check_unique(labels: LabelMap, path: Path) -> None:
    """Raise DataError if a name or a label occurs twice."""
    for what, values in (
        ("name", [item.name for item in labels.item]),
        ("label", [str(item.label) for item in labels.item]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise DataError(f"the label map {path} has the {what} {twice[0]} more than once")


def label_map_text(names: Sequence[str]) -> str:
    """Return the LabelMap of classes, from label 1 on, and of the background in text form."""
    quoted = [name.replace("\\", "\\\\").replace('"', '\\"') for name in names]
    items = [
        ("none_of_the_above", 0, "background"),
        *((name, n, name) for n, name in enumerate(quoted, 1)),
    ]
    return "".join(
        f'item {{\n  name: "{name}"\n  label: {label}\n  display_name: "{shown}"\n}}\n'
        for name, label, shown in items
    )
