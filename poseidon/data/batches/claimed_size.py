"""The size that an encoded picture claims in its header, before anybody takes memory for it.

Law: a damaged header that claims millions of rows costs nothing but the look at it. Forms that are not known here are
left to the decoder.
"""

from __future__ import annotations

from poseidon.errors import DataError

# The best that PNG's compression does is 1032 bytes from one, each of eight pixels of one bit; JPEG and BMP do less.
PIXELS_A_BYTE = 8 * 1032
# Any picture may have these many, so that tiny ones of one colour are safe whatever the form.
ALWAYS = 1 << 16

PNG = b"\x89PNG\r\n\x1a\n"
# JPEG's frame headers: SOF0 to SOF15 without DHT, JPG and DAC.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def check_claim(encoded: bytes) -> None:
    """Refuse a picture that claims more pixels than its bytes can hold, or a chunk longer than itself.

    Raises:
        DataError: it does. The text names no place.
    """
    if encoded.startswith(PNG):
        _check_chunks(encoded)
    width, height = claimed_size(encoded)
    if width * height > max(ALWAYS, PIXELS_A_BYTE * len(encoded)):
        raise DataError(
            f"the encoded picture claims to be {width} wide and {height} high, more than its {len(encoded)} bytes can hold"
        )


def claimed_size(encoded: bytes) -> tuple[int, int]:
    """Width and height as a PNG, JPEG or BMP claims them; (0, 0) for what is none of these."""
    if encoded.startswith(PNG):
        return _number(encoded, 16, 4), _number(encoded, 20, 4)
    if encoded.startswith(b"BM"):
        width, height = (
            int.from_bytes(encoded[place : place + 4], "little", signed=True) for place in (18, 22)
        )
        return abs(width), abs(height)
    if encoded.startswith(b"\xff\xd8"):
        return _jpeg(encoded)
    return 0, 0


def _check_chunks(encoded: bytes) -> None:
    place = len(PNG)
    while place + 8 <= len(encoded) and encoded[place + 4 : place + 8] != b"IEND":
        place += 12 + _number(encoded, place, 4)
    if place > len(encoded):
        raise DataError(
            "the encoded picture is damaged or cut short: its last chunk is longer than what is left"
        )


def _jpeg(encoded: bytes) -> tuple[int, int]:
    """Return the largest that any frame header claims; segments are walked up to the first scan."""
    place, found = 2, (0, 0)
    while place + 9 <= len(encoded):
        if encoded[place] != 0xFF:
            place += 1  # as decoders do: they look for the next marker
            continue
        marker = encoded[place + 1]
        if marker in FRAMES:
            found = max(found, (_number(encoded, place + 7, 2), _number(encoded, place + 5, 2)), key=_area)
        if marker == 0xDA:
            break
        alone = marker == 0xFF or marker in range(0xD0, 0xD9) or marker in (0x00, 0x01)
        place += 1 if marker == 0xFF else 2 if alone else 2 + max(2, _number(encoded, place + 2, 2))
    return found


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _number(encoded: bytes, place: int, length: int) -> int:
    return int.from_bytes(encoded[place : place + length], "big")
