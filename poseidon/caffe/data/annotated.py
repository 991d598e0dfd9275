"""SSD's AnnotatedDatum: an image with its objects as a database record.

Law: every record is checked before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from poseidon.base.hints import own_command
from poseidon.caffe.data.augment.boxes import Box, Object
from poseidon.caffe.data.datum import Decoding, decode
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum, Datum
from poseidon.errors import DataError


class AnnotatedImage(NamedTuple):
    """A decoded record.

    Attributes:
        image: (C, H, W), read-only.
        label: the label of the whole image.
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
