"""AnnotatedDatum: objects through a record, and records that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe.data.annotated import decode_annotated, encode_annotated, object_rows
from poseidon.caffe.data.augment.boxes import Box, Object
from poseidon.caffe.data.datum import Decoding, encode_datum
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum, Datum
from poseidon.errors import DataError
from tests.support.databases import picture

OBJECTS = [
    Object(3, 0, Box(0.25, 0.5, 0.75, 1.0), True),
    Object(1, 0, Box(0.0, 0.0, 0.5, 0.25), False),
    Object(3, 1, Box(0.5, 0.25, 0.75, 0.5), False),
]


def datum() -> Datum:
    return Datum.FromString(encode_datum(picture(1), 7))


def test_objects_come_back_in_groups() -> None:
    record = encode_annotated(datum(), OBJECTS)
    groups = AnnotatedDatum.FromString(record).annotation_group
    assert [(group.group_label, len(group.annotation)) for group in groups] == [(3, 2), (1, 1)]
    found = decode_annotated(record, Decoding.AS_STORED)
    assert np.array_equal(found.image, picture(1))
    assert found.label == 7
    assert found.objects == [OBJECTS[0], OBJECTS[2], OBJECTS[1]]


def test_a_record_without_a_type_has_a_label_only() -> None:
    record = AnnotatedDatum(datum=datum()).SerializeToString()
    assert decode_annotated(record, Decoding.AS_STORED)[1:] == (7, None)


def test_rows_of_a_batch() -> None:
    rows = object_rows([OBJECTS[:1], [], OBJECTS[1:2]])
    assert rows.tolist() == [[[[0, 3, 0, 0.25, 0.5, 0.75, 1, 1], [2, 1, 0, 0, 0, 0.5, 0.25, 0]]]]
    assert object_rows([[], []]).tolist() == [[[[-1] * 8]]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\xff\xff", "not an AnnotatedDatum"),
        (encode_datum(picture(1), 1), "not an AnnotatedDatum: it has no image"),
        (
            AnnotatedDatum(
                datum=Datum(channels=3, height=2, width=2, data=b"1")
            ).SerializeToString(),
            "holds 1 bytes",
        ),
    ],
)
def test_other_records_are_refused(record: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode_annotated(record, Decoding.AS_STORED)


def test_boxes_that_are_not_finite_are_refused() -> None:
    record = encode_annotated(datum(), [Object(1, 0, Box(0, 0, float("nan"), 1), False)])
    with pytest.raises(DataError, match="expected finite numbers"):
        decode_annotated(record, Decoding.AS_STORED)
