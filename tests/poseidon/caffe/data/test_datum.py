"""Records in every form that Caffe writes, and records that contradict themselves."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from poseidon.caffe.data.boxes import Box, Object
from poseidon.caffe.data.datum import (
    Decoding,
    RawLayout,
    check_unique,
    decode,
    decode_annotated,
    encode_annotated,
    encode_datum,
    labels_of,
    names_of,
    object_rows,
    read_label_map,
)
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum, Datum
from poseidon.errors import DataError
from tests.support.databases import picture

# one row: a red and a blue pixel, as R, G, B
RED_BLUE = np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)


def encoded(image: Image.Image, form: str = "PNG", label: int = 3) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return Datum(data=buffer.getvalue(), encoded=True, label=label).SerializeToString()


@pytest.mark.parametrize("label", [0, 1, 127, 128, 70_000, -1])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_what_is_encoded_is_decoded(label: int, dtype: type[np.generic]) -> None:
    array = picture(1).astype(dtype)
    found, found_label = decode(encode_datum(array, label))
    assert found.dtype == dtype
    assert found_label == label
    np.testing.assert_array_equal(found, array)


def test_an_encoded_picture_is_blue_first() -> None:
    array, label = decode(encoded(Image.fromarray(RED_BLUE)))
    assert label == 3
    assert array.tolist() == [[[0, 255]], [[0, 0]], [[255, 0]]]
    assert array.flags.c_contiguous


GREY = Image.fromarray(np.array([[10, 200]], np.uint8))


COLOR = Image.fromarray(RED_BLUE)


@pytest.mark.parametrize(
    ("image", "decoding", "expected"),
    [
        (GREY, Decoding.AS_STORED, [[[10, 200]]]),
        (GREY, Decoding.COLOR, [[[10, 200]]] * 3),
        (GREY, Decoding.GRAY, [[[10, 200]]]),
        (COLOR, Decoding.GRAY, [[[76, 29]]]),
        (
            COLOR.convert("RGBA"),
            Decoding.AS_STORED,
            [[[0, 255]], [[0, 0]], [[255, 0]], [[255] * 2]],
        ),
        (COLOR.convert("RGBA"), Decoding.COLOR, [[[0, 255]], [[0, 0]], [[255, 0]]]),
        (COLOR.convert("P"), Decoding.AS_STORED, [[[0, 255]], [[0, 0]], [[255, 0]]]),
        (Image.new("1", (2, 1), 1), Decoding.AS_STORED, [[[255, 255]]]),
    ],
)
def test_channels_of_encoded_pictures(
    image: Image.Image, decoding: Decoding, expected: list[object]
) -> None:
    assert decode(encoded(image), decoding)[0].tolist() == expected


def test_a_jpeg() -> None:
    array, _ = decode(encoded(Image.new("RGB", (8, 6), (200, 100, 50)), "JPEG"))
    assert array.shape == (3, 6, 8)
    np.testing.assert_allclose(array[:, 0, 0], [50, 100, 200], atol=3)
    grey, _ = decode(encoded(Image.new("RGB", (8, 6), (200, 100, 50)), "JPEG"), Decoding.GRAY)
    assert grey.shape == (1, 6, 8)
    np.testing.assert_allclose(grey, 124, atol=2)


SHAPE = {"channels": 3, "height": 2, "width": 2}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\xff\xff\xff", "not a Datum"),
        (b"", "not a Datum with an image: it has channels 0 x height 0 x width 0"),
        (Datum(**SHAPE, data=bytes(11)).SerializeToString(), "holds 11 bytes"),
        (Datum(**SHAPE, float_data=[1.0] * 13).SerializeToString(), "holds 13 floats"),
        (Datum(**SHAPE).SerializeToString(), "holds 0 floats"),
        (Datum(channels=-1, height=2, width=2, data=b"12").SerializeToString(), "channels -1"),
        (Datum(data=b"no images", encoded=True).SerializeToString(), "image cannot be decoded"),
        (encoded(Image.new("RGB", (9, 9)))[:60], "not a Datum"),
        (encoded(Image.fromarray(np.zeros((2, 2), np.uint16))), "more than 8 bits"),
    ],
)
def test_records_that_are_wrong(record: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode(record)


def test_a_picture_that_is_cut_short() -> None:
    datum = Datum.FromString(
        encoded(Image.fromarray(picture(0, (3, 64, 64)).transpose(1, 2, 0)), "JPEG")
    )
    datum.data = datum.data[: len(datum.data) // 2]
    with pytest.raises(DataError, match="image cannot be decoded"):
        decode(datum.SerializeToString())


@given(label=st.integers(-(2**31), 2**31 - 1), said=st.booleans())
def test_the_raw_layout_reads_what_the_parser_reads_or_declines(label: int, said: bool) -> None:
    first = RawLayout.of(encode_datum(picture(0), 5))
    assert first is not None
    datum = Datum.FromString(encode_datum(picture(2), label))
    if said:
        datum.encoded = False
    record = memoryview(datum.SerializeToString())
    assert first.matches(record)
    assert first.pixels(record) == picture(2).tobytes()
    assert first.label(bytes(record[first.end :])) == (label if label >= 0 else None)


def test_a_record_without_label() -> None:
    record = Datum(**SHAPE, data=bytes(12)).SerializeToString()
    layout = RawLayout.of(record)
    assert layout is not None
    assert layout.label(record[layout.end :]) == 0


@pytest.mark.parametrize(
    "record",
    [
        encode_datum(picture(0).astype(np.float32), 0),
        encoded(Image.fromarray(RED_BLUE)),
        Datum(**SHAPE, data=bytes(11)).SerializeToString(),
        encode_datum(picture(0), -1),
        Datum(**SHAPE, data=bytes(12), label=1, float_data=[1.0]).SerializeToString(),
    ],
    ids=["float", "encoded", "wrong size", "negative label", "extra field"],
)
def test_records_with_no_raw_layout(record: bytes) -> None:
    assert RawLayout.of(record) is None


@pytest.mark.parametrize(
    "tail", [b"\x28", b"\x28\x80", b"\x28\x01\x28\x02", b"\x30\x01", b"\x28\xff\xff\xff\xff\x0f"]
)
def test_tails_that_are_left_to_the_parser(tail: bytes) -> None:
    layout = RawLayout.of(encode_datum(picture(0), 5))
    assert layout is not None
    assert layout.label(tail) is None


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


TEXT = 'item { name: "cat" label: 1 } item { name: "dog" label: 2 display_name: "Dog" }'


def test_names_and_labels(tmp_path: Path) -> None:
    (tmp_path / "map").write_text(TEXT)
    found = read_label_map(tmp_path / "map")
    assert names_of(found) == {1: "cat", 2: "dog"}
    assert labels_of(found) == {"cat": 1, "dog": 2}
    check_unique(found, tmp_path / "map")


@pytest.mark.parametrize(
    ("what", "again"), [("name cat", 'name: "cat" label: 7'), ("label 2", 'name: "x" label: 2')]
)
def test_what_occurs_twice_is_refused(tmp_path: Path, what: str, again: str) -> None:
    (tmp_path / "map").write_text(f"{TEXT} item {{ {again} }}")
    with pytest.raises(DataError, match=f"has the {what} more than once"):
        check_unique(read_label_map(tmp_path / "map"), tmp_path / "map")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "map").write_text(TEXT, encoding="utf-8-sig")
    assert read_label_map(tmp_path / "map").item[0].name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the label map"),
        ("", "has no item"),
        ("item { lable: 3 }", "lable"),
        ("\xff", "UTF-8"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "map").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        read_label_map(tmp_path / "map")
