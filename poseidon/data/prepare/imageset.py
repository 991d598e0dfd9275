"""Picture files into a database, as Caffe's convert_imageset does it.

Law: the record of line i of the list (after the shuffle, if any) has the key `<i>_<path>`, i in eight digits. A picture that cannot
be read is an error with its line, where Caffe leaves it out and says nothing; the database appears when all are in it.

Source: caffe/tools/convert_imageset.cpp, ReadImageToDatum in util/io.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from poseidon.data.batches.order import permutation
from poseidon.data.batches.pictures import Line, decoded, planes, read_list, resized
from poseidon.data.databases.kinds import Backend
from poseidon.data.databases.writer import write_database
from poseidon.data.progress import Report, silent
from poseidon.errors import DataError
from poseidon.proto.caffe_pb2 import Datum

# Pictures decoded side by side before they are written.
CHUNK = 256
JPEG = ("jpg", "jpeg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How pictures become records.

    Attributes:
        gray: one channel, else three.
        size: height and width to give each picture; a 0 leaves the picture's own.
        encoded: keep pictures in a file format, else as pixels.
        encode_type: that format, such as `png`; empty: that of each file.
        check_size: all pictures must have as many values.
        shuffle: in an order drawn from `seed`.
        seed: of the shuffle.
    """

    gray: bool = False
    size: tuple[int, int] = (0, 0)
    encoded: bool = False
    encode_type: str = ""
    check_size: bool = False
    shuffle: bool = False
    seed: int = 0


def convert_imageset(
    root: str, source: Path, path: Path, backend: Backend, conversion: Conversion, *, report: Report = silent
) -> int:
    """Write the pictures of a list into a new database.

    Args:
        root: put before each path of the list as it is.
        source: the list; a line is a path, a space and the label.
        path: of the database.
        backend: its kind.
        conversion: how.
        report: told how many are written, for a progress bar.

    Returns:
        the number of records.

    Raises:
        DataError: a picture or the list cannot be read, sizes differ though they are checked, or the database exists.
    """
    lines = read_list(source, "")
    if conversion.shuffle:
        lines = [lines[place] for place in permutation(conversion.seed, 0, len(lines))]
    values = None
    with write_database(path, backend) as writer:
        for number, (line, datum) in enumerate(_records(root, source, lines, conversion)):
            if conversion.check_size and not datum.encoded:
                values = values or len(datum.data)
                if len(datum.data) != values:
                    raise DataError(
                        f"{source}:{line.number}: picture of {len(datum.data)} values, expected {values} as in the first"
                    )
            writer.put(b"%08d_%s" % (number, os.fsencode(line.path)), datum.SerializeToString())
            report("converting", number + 1, len(lines))
    return len(lines)


def _records(
    root: str, source: Path, lines: Sequence[Line], conversion: Conversion
) -> Iterator[tuple[Line, Datum]]:
    """Yield each line with its record, made side by side."""
    make = partial(_record, root, source, conversion)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="poseidon-convert") as pool:
        for start in range(0, len(lines), CHUNK):
            chunk = lines[start : start + CHUNK]
            yield from zip(chunk, pool.map(make, chunk), strict=True)


def _record(root: str, source: Path, conversion: Conversion, line: Line) -> Datum:
    try:
        return to_datum(Path(root + line.path), line.label, conversion)
    except DataError as error:
        raise DataError(f"{source}:{line.number}: {error}") from error


def to_datum(path: Path, label: int, conversion: Conversion) -> Datum:
    """Return the record of one picture file.

    Raises:
        DataError: it cannot be read, or not be encoded.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the picture {path} cannot be read: {error.strerror}") from error
    own = path.suffix.removeprefix(".").lower()
    kind = conversion.encode_type.lower() or (own if conversion.encoded else "")
    pixels = decoded(content, path, color=not conversion.gray)
    if kind and not any(conversion.size) and _same_format(own, kind) and _same_channels(content, pixels):
        # The file's own bytes, as they are.
        return Datum(data=content, label=label, encoded=True)
    high, wide = (side or own_side for side, own_side in zip(conversion.size, pixels.shape[:2], strict=True))
    pixels = resized(pixels, (high, wide))
    if kind:
        return Datum(data=_encoded(pixels, kind, path), label=label, encoded=True)
    picture = planes(pixels)
    channels, height, width = picture.shape
    return Datum(
        channels=channels, height=height, width=width, data=picture.tobytes(), label=label, encoded=False
    )


def _same_format(own: str, kind: str) -> bool:
    return own == kind or (own in JPEG and kind in JPEG)


def _same_channels(content: bytes, pixels: Any) -> bool:
    """Return whether the file has the channels that were asked for, so that its bytes will do."""
    stored = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    return stored is not None and stored.ndim == pixels.ndim


def _encoded(pixels: Any, kind: str, path: Path) -> bytes:
    try:
        done, buffer = cv2.imencode(f".{kind}", pixels)
    except cv2.error as error:
        raise DataError(
            f"the picture {path} cannot be encoded as '{kind}': no such format is known"
        ) from error
    if not done:
        raise DataError(f"the picture {path} cannot be encoded as '{kind}'")
    return bytes(buffer)
