"""A check of the size in the header of an encoded image, before memory is allocated for it.

Law: a damaged header with millions of rows costs no memory. Formats other than
PNG, JPEG, BMP, WebP, TIFF and GIF are left to the decoder.
"""

from __future__ import annotations

import math
from typing import Literal

from poseidon.errors import DataError

# PNG's best compression is 1032 bytes to one, each of eight 1-bit pixels. JPEG and BMP compress
# less. WebP, TIFF and GIF may hold any number of pixels of one color in a few bytes.
PIXELS_A_BYTE = 8 * 1032
MOST_PIXELS = 1 << 27
"""Of an image, which takes 400 MB of memory. A file of a few kB may hold a billion of one color."""
# Any image may have this many pixels, so that small ones of one color pass in every format.
ALWAYS = 1 << 16

PNG = b"\x89PNG\r\n\x1a\n"
MOST_TAGS = 1 << 16
TIFF_BYTES = {1: 1, 3: 2, 4: 4, 16: 8}
"""Bytes of a value of TIFF by its type: BYTE, SHORT, LONG, LONG8."""
# JPEG's frame headers: SOF0 to SOF15 without DHT, JPG and DAC.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def check_claim(encoded: bytes) -> None:
    """Reject an image whose header claims more pixels than its bytes can hold, or than `MOST_PIXELS`,
    or a chunk longer than the file.

    Raises:
        DataError: the header is wrong. The caller adds the name of the image.
    """
    if encoded.startswith(PNG):
        _check_chunks(encoded)
    width, height = claimed_size(encoded)
    packs_more = encoded.startswith((b"RIFF", b"II", b"MM", b"GIF"))
    if not packs_more and width * height > max(ALWAYS, PIXELS_A_BYTE * len(encoded)):
        raise DataError(
            f"the encoded image claims a width of {width} and a height of {height}, more than its "
            f"{len(encoded)} bytes can hold"
        )
    if width * height > MOST_PIXELS:
        raise DataError(
            f"the encoded image has a width of {width} and a height of {height}; it may have "
            f"{MOST_PIXELS:,} pixels"
        )


def claimed_size(encoded: bytes) -> tuple[int, int]:
    """Return width and height of a PNG, JPEG, BMP, WebP, TIFF or GIF header; else (0, 0)."""
    if encoded.startswith(PNG):
        return _number(encoded, 16, 4), _number(encoded, 20, 4)
    if encoded.startswith(b"BM"):
        width, height = (
            int.from_bytes(encoded[offset : offset + 4], "little", signed=True)
            for offset in (18, 22)
        )
        return abs(width), abs(height)
    if encoded.startswith(b"\xff\xd8"):
        return _jpeg(encoded)
    if encoded.startswith(b"RIFF") and encoded[8:12] == b"WEBP":
        return _webp(encoded)
    if encoded[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return _tiff(encoded)
    if encoded.startswith(b"GIF8"):
        return _little(encoded, 6, 2), _little(encoded, 8, 2)
    return 0, 0


def _webp(encoded: bytes) -> tuple[int, int]:
    kind = encoded[12:16]
    if kind == b"VP8X":
        return 1 + _little(encoded, 24, 3), 1 + _little(encoded, 27, 3)
    if kind == b"VP8L":
        sides = _little(encoded, 21, 4)
        return 1 + (sides & 0x3FFF), 1 + (sides >> 14 & 0x3FFF)
    return _little(encoded, 26, 2) & 0x3FFF, _little(encoded, 28, 2) & 0x3FFF


def _tiff(encoded: bytes) -> tuple[int, int]:
    """Return the size of the first page: values of the tags 256 and 257 in its list of tags."""
    order: Literal["little", "big"] = "little" if encoded.startswith(b"II") else "big"
    is_big = 43 in encoded[2:4]  # BigTIFF, with offsets of 8 bytes
    entry, count_bytes, value = (20, 8, 12) if is_big else (12, 2, 8)
    start, length = (8, 8) if is_big else (4, 4)

    def number(offset: int, size: int) -> int:
        return int.from_bytes(encoded[offset : offset + size], order)

    first = number(start, length)
    sides = {256: 0, 257: 0}
    for index in range(min(number(first, count_bytes), MOST_TAGS)):
        at = first + count_bytes + entry * index
        if number(at, 2) in sides:
            sides[number(at, 2)] = number(at + value, TIFF_BYTES.get(number(at + 2, 2), 4))
    return sides[256], sides[257]


def _check_chunks(encoded: bytes) -> None:
    offset, kind = len(PNG), b""
    while offset + 8 <= len(encoded) and kind != b"IEND":
        kind = encoded[offset + 4 : offset + 8]
        # decoders do not need the checksum of the last one
        offset += (8 if kind == b"IEND" else 12) + _number(encoded, offset, 4)
    if offset > len(encoded):
        raise DataError(
            "the encoded image is damaged or truncated: its last chunk is longer than the rest of "
            "the file"
        )


def _jpeg(encoded: bytes) -> tuple[int, int]:
    """Return the largest size in any frame header before the first scan."""
    offset, found = 2, (0, 0)
    while offset + 9 <= len(encoded):
        if encoded[offset] != 0xFF:
            offset += 1  # decoders search for the next marker, too
            continue
        marker = encoded[offset + 1]
        if marker in FRAMES:
            found = max(
                found,
                (_number(encoded, offset + 7, 2), _number(encoded, offset + 5, 2)),
                key=math.prod,
            )
        if marker == 0xDA:
            break
        alone = marker == 0xFF or marker in range(0xD0, 0xD9) or marker in (0x00, 0x01)
        offset += (
            1 if marker == 0xFF else 2 if alone else 2 + max(2, _number(encoded, offset + 2, 2))
        )
    return found


def _little(encoded: bytes, offset: int, length: int) -> int:
    return int.from_bytes(encoded[offset : offset + length], "little")


def _number(encoded: bytes, offset: int, length: int) -> int:
    return int.from_bytes(encoded[offset : offset + length], "big")
