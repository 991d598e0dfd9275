"""Sizes are read from headers as decoders read them, and a claim beyond reason is refused."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from poseidon.caffe.data.batches.claimed_size import check_claim, claimed_size
from poseidon.caffe.data.datum import decode
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.errors import DataError


def encoded(form: str, height: int, width: int, *, options: tuple[int, ...] = ()) -> bytes:
    return cv2.imencode(form, np.zeros((height, width, 3), np.uint8), options)[1].tobytes()


@pytest.mark.parametrize("form", (".png", ".jpg", ".bmp", ".webp", ".tiff", ".gif"))
def test_size_of_what_opencv_writes(form: str) -> None:
    picture = encoded(form, 31, 200)
    assert claimed_size(picture) == (200, 31)
    for cut in range(0, len(picture), 7):
        claimed_size(picture[:cut])


def test_progressive_jpeg() -> None:
    options = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_RST_INTERVAL, 2)
    assert claimed_size(encoded(".jpg", 31, 200, options=options)) == (200, 31)


def test_fill_bytes_before_a_marker() -> None:
    picture = encoded(".jpg", 31, 200)
    assert claimed_size(picture[:2] + b"\xff\xff\xff" + picture[2:]) == (200, 31)


def test_other_forms_are_left_to_the_decoder() -> None:
    for content in (encoded(".ppm", 5, 6), b"", b"text", b"RIFFtext"):
        assert claimed_size(content) == (0, 0)
        check_claim(content)


LOSSY_WEBP = (cv2.IMWRITE_WEBP_QUALITY, 50)
# 20,000 x 30,000 in the two orders of bytes: TIFF with sides of two bytes, BigTIFF of four
TAGS = {
    "little": "4949 2a00 08000000 0200 0001 0300 01000000 204e0000 0101 0300 01000000 30750000",
    "big": "4d4d 002a 00000008 0002 0100 0003 00000001 4e200000 0101 0003 00000001 75300000",
    "BigTIFF": "4949 2b00 0800 0000 1000000000000000 0200000000000000"
    "0001 0400 0100000000000000 204e000000000000 0101 0400 0100000000000000 3075000000000000",
}


def test_the_kinds_of_webp_and_tiff() -> None:
    assert claimed_size(encoded(".webp", 31, 200, options=LOSSY_WEBP)) == (200, 31)
    extended = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xc7\0\0\x1e\0\0"
    assert claimed_size(extended) == (200, 31)
    for tags in TAGS.values():
        assert claimed_size(bytes.fromhex(tags)) == (20000, 30000)
        with pytest.raises(DataError, match="it may have 134,217,728 pixels"):
            check_claim(bytes.fromhex(tags))


@pytest.mark.parametrize("form", (".png", ".jpg", ".bmp", ".webp", ".tiff"))
def test_one_colour_is_no_claim_beyond_reason(form: str) -> None:
    check_claim(encoded(form, 4000, 4000))
    check_claim(encoded(form, 1, 1))


@pytest.mark.parametrize(
    ("form", "place", "sides"),
    (
        (".png", 16, "0098968000989680"),
        (".bmp", 18, "8096980080969800"),
        (".jpg", None, "fde8fde8"),
    ),
)
def test_a_claim_beyond_reason_is_refused(form: str, place: int | None, sides: str) -> None:
    picture = encoded(form, 8, 8)
    at = picture.index(b"\xff\xc0") + 5 if place is None else place
    changed = picture[:at] + bytes.fromhex(sides) + picture[at + len(sides) // 2 :]
    record = Datum(data=changed, encoded=True).SerializeToString()
    with pytest.raises(DataError, match=r"claims a width of \d+ and a height of \d+"):
        decode(record)


@pytest.mark.parametrize("sides", [(2**14, 2**14), (2**27 + 1, 1)])
def test_a_bomb_is_refused_by_its_header(sides: tuple[int, int]) -> None:
    """A file of 130 kB may hold a billion pixels of one color: 20 s to decode, and 3 GB."""
    picture = encoded(".png", 8, 8)
    width, height = (side.to_bytes(4, "big") for side in sides)
    rest = bytes(1 << 16)  # after the last chunk: the file could hold what it claims
    bomb = picture[:16] + width + height + picture[24:] + rest
    with pytest.raises(DataError, match=r"has a width of \d+ and a height of \d+"):
        check_claim(bomb)


def test_a_chunk_longer_than_the_picture_is_refused() -> None:
    picture = encoded(".png", 8, 8)
    at = picture.index(b"IDAT") - 4
    with pytest.raises(DataError, match="its last chunk is longer than the rest"):
        check_claim(picture[:at] + b"\x40" + picture[at + 1 :])
    with pytest.raises(DataError, match="its last chunk is longer than the rest"):
        check_claim(picture[: at + 10])
    end = picture.index(b"IEND") - 4
    with pytest.raises(DataError, match="its last chunk is longer than the rest"):
        check_claim(picture[:end] + b"\x40" + picture[end + 1 :])
