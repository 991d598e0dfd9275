"""Conversion of image files to a database, as by Caffe's convert_imageset.

Law: the record of line i of the list (after the shuffle, if any) has the key `<i>_<path>`, i with
eight digits. An image that cannot be read is left out with a warning that names the line, as in
Caffe; if none can be read, that is an error. The database appears when it is complete.

Source: caffe/tools/convert_imageset.cpp, ReadImageToDatum in util/io.cpp.

A small drawn set of pictures of two classes, cars and boats, for a first run without a download.

Law: a picture depends on seed, number and label only. Size, position, direction, colors, background
and noise are independent of the class: only the shape differs between the classes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import cv2
import numpy as np
import numpy.typing as npt

from poseidon.base.foreign_files import read_definition
from poseidon.caffe.data.batches.images import (
    LARGEST_IMAGE,
    Line,
    decoded,
    missing_hint,
    read_list,
    resized,
)
from poseidon.caffe.data.batches.lists import permutation
from poseidon.caffe.data.batches.transform import planes
from poseidon.caffe.data.cursor import write_database
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.staging import Report, silent
from poseidon.caffe.proto.caffe_pb2 import Datum
from poseidon.errors import DataError

LOGGER = logging.getLogger(__name__)
# Images decoded in parallel before they are written.
CHUNK = 256
JPEG = ("jpg", "jpeg")

Item = TypeVar("Item")
Result = TypeVar("Result")


class UnreadableImage(DataError):
    """An image file is missing or damaged."""


class ImageLine(Protocol):
    """A line of a list of images."""

    @property
    def number(self) -> int: ...

    @property
    def path(self) -> str: ...


L = TypeVar("L", bound=ImageLine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The options of the conversion.

    Attributes:
        gray: True for one channel, False for three.
        size: height and width to resize images to; 0 keeps the image's own.
        shorter_side: length to resize the shorter side to, the other in proportion, in place of
            `size`; 0: none.
        least_side: enlarge images in proportion until their shorter side has this length; 0: do
            not.
        most_side: shrink images in proportion until their longer side has this length; 0: do not.
        encoded: store images in a file format, not as pixels.
        encode_type: the format, such as `png`; empty: the format of each file.
        check_size: require the same number of values in all images.
        shuffle: store the images in an order drawn from `seed`.
    """

    gray: bool = False
    size: tuple[int, int] = (0, 0)
    shorter_side: int = 0
    least_side: int = 0
    most_side: int = 0
    encoded: bool = False
    encode_type: str = ""
    check_size: bool = False
    shuffle: bool = False
    seed: int = 0


class Made(NamedTuple):
    """A record: its bytes, the number of values of a raw image, and height and width of the file
    where they are measured.
    """

    content: bytes
    values: int
    size: tuple[int, int] = (0, 0)


def convert_imageset(
    root: str,
    source: Path,
    path: Path,
    backend: Backend,
    conversion: Conversion,
    *,
    report: Report = silent,
) -> int:
    """Write the images of a list to a new database. Return the number of records.

    Args:
        root: the prefix of each path of the list.
        source: the list; a line is a path, a space and the label.
        path: the new database.
        report: called with the number of records written, for a progress bar.

    Raises:
        DataError: the list or all its images cannot be read, sizes differ and `check_size` is set,
            or the database exists.
    """
    lines = read_list(source, "")
    make = partial(_record, root, source, conversion)
    return sum(1 for _ in written(source, lines, make, path, backend, conversion, report))


def written(
    source: Path,
    lines: Sequence[L],
    make: Callable[[L], Made],
    path: Path,
    backend: Backend,
    conversion: Conversion,
    report: Report,
) -> Iterator[tuple[L, Made]]:
    """Write the records that `make` returns for the lines of a list, which threads call.

    The database appears after the last one.

    Yields:
        each line with its record, in the order of the database; none for an image that cannot be
        read.

    Raises:
        DataError: no image can be read, or sizes differ and `check_size` is set.
    """

    def made_or_why(line: L) -> Made | UnreadableImage:
        try:
            return make(line)
        except UnreadableImage as error:
            return error

    if conversion.shuffle:
        lines = [lines[index] for index in permutation(conversion.seed, 0, len(lines))]
    expected = 0
    unreadable: list[UnreadableImage] = []
    with write_database(path, backend) as writer:
        for number, (line, made) in enumerate(in_parallel(made_or_why, lines)):
            if isinstance(made, UnreadableImage):
                unreadable.append(made)
                if len(unreadable) == len(lines):
                    raise unreadable[0]
                LOGGER.warning("%s; it is left out", made)
                continue
            expected = expected or made.values
            if conversion.check_size and made.values not in (0, expected):
                raise DataError(
                    f"{source}:{line.number}: image of {made.values} values, expected {expected} "
                    "as in the first"
                )
            writer.put(b"%08d_%s" % (number, os.fsencode(line.path)), made.content)
            report("converting", number + 1, len(lines))
            yield line, made


def in_parallel(
    make: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with what `make` returns for it, which threads call."""
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="poseidon-convert") as pool:
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            yield from zip(chunk, pool.map(make, chunk), strict=True)


def _record(root: str, source: Path, conversion: Conversion, line: Line) -> Made:
    try:
        datum = to_datum(Path(root + line.path), line.label, conversion)
        return Made(datum.SerializeToString(), 0 if datum.encoded else len(datum.data))
    except DataError as error:
        raise type(error)(
            f"{source}:{line.number}: {error}{missing_hint(root, line.path)}"
        ) from error


def to_datum(path: Path, label: int, conversion: Conversion) -> Datum:
    """Return the record of an image file.

    Raises:
        UnreadableImage: the file cannot be read.
        DataError: it cannot be encoded.
    """
    try:
        content = read_definition(path, most_bytes=LARGEST_IMAGE)
    except OSError as error:
        raise UnreadableImage(f"the image {path} cannot be read: {error.strerror}") from error
    own = path.suffix.removeprefix(".").lower()
    kind = conversion.encode_type.lower() or (own if conversion.encoded else "")
    try:
        pixels = decoded(content, path, color=not conversion.gray)
    except DataError as error:
        raise UnreadableImage(str(error)) from error
    sides = (*conversion.size, conversion.shorter_side, conversion.least_side, conversion.most_side)
    unsized = not any(sides)
    if kind and unsized and _same_format(own, kind) and _same_channels(content, pixels):
        # Store the bytes of the file unchanged.
        return Datum(data=content, label=label, encoded=True)
    pixels = resized(pixels, _size(conversion, pixels.shape[0], pixels.shape[1]))
    if kind:
        return Datum(data=_encoded(pixels, kind, path), label=label, encoded=True)
    image = planes(pixels)
    channels, height, width = image.shape
    return Datum(
        channels=channels,
        height=height,
        width=width,
        data=image.tobytes(),
        label=label,
        encoded=False,
    )


def _size(conversion: Conversion, height: int, width: int) -> tuple[int, int]:
    """Return the height and width that an image gets."""
    if conversion.shorter_side:
        scale = conversion.shorter_side / min(height, width)
        return round(height * scale), round(width * scale)
    if conversion.least_side or conversion.most_side:
        scale = max(1.0, conversion.least_side / min(height, width))
        if conversion.most_side and int(scale * max(height, width)) > conversion.most_side:
            scale = conversion.most_side / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))
    return conversion.size[0] or height, conversion.size[1] or width


def _same_format(own: str, kind: str) -> bool:
    return own == kind or (own in JPEG and kind in JPEG)


def _same_channels(content: bytes, pixels: Any) -> bool:
    """Return whether the file has the wanted number of channels, so that its bytes can be stored
    unchanged.
    """
    stored = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    return stored is not None and stored.ndim == pixels.ndim


def _encoded(pixels: Any, kind: str, path: Path) -> bytes:
    try:
        done, buffer = cv2.imencode(f".{kind}", pixels)
    except cv2.error as error:
        raise DataError(
            f"the image {path} cannot be encoded as '{kind}': unknown format"
        ) from error
    if not done:
        raise DataError(f"the image {path} cannot be encoded as '{kind}'")
    return bytes(buffer)


Array = npt.NDArray[Any]

CLASS_NAMES = ("car", "boat")
SIDES = (96, 144)
"""The least and the largest side, in pixels."""
SUBPIXEL = 4
"""Bits of a fraction of a pixel in OpenCV's coordinates."""
JPEG_QUALITY = 90

# Outlines in a frame of -1..1 in both directions, y downwards.
CAR = (
    (
        (-1, 0.35),
        (-1, -0.05),
        (-0.6, -0.1),
        (-0.35, -0.5),
        (0.35, -0.5),
        (0.62, -0.1),
        (1, 0),
        (1, 0.35),
    ),
    ((-0.45, -0.1), (-0.28, -0.4), (0.0, -0.4), (0.0, -0.1)),
    ((0.08, -0.1), (0.08, -0.4), (0.28, -0.4), (0.45, -0.1)),
)
WHEELS = ((-0.55, 0.38), (0.55, 0.38))
BOAT = (
    ((-1, 0.25), (1, 0.15), (0.7, 0.65), (-0.7, 0.65)),
    ((-0.04, -0.95), (0.04, -0.95), (0.04, 0.25), (-0.04, 0.25)),
    ((0.1, -0.85), (0.75, 0.08), (0.1, 0.1)),
    ((-0.1, -0.7), (-0.6, 0.1), (-0.1, 0.1)),
)


def draw_labels(count: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` labels, 0 and 1 as equal in number as possible, in random order."""
    labels: npt.NDArray[np.int64] = np.random.default_rng((seed, count)).permutation(
        np.arange(count) % 2
    )
    return labels


def draw_picture(number: int, label: int, *, seed: int) -> bytes:
    """Return picture `number` as a JPEG file: a car for label 0, a boat for label 1."""
    random = np.random.default_rng((seed, number))
    height, width = (int(side) for side in random.integers(SIDES[0], SIDES[1] + 1, 2))
    image = _background(height, width, random)
    _draw(image, label, random)
    values = image.astype(np.float32) + random.normal(0, random.uniform(2, 12), image.shape)
    pixels = cv2.GaussianBlur(np.clip(values, 0, 255).astype(np.uint8), (3, 3), 0)
    _, content = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return bytes(content)


def _background(height: int, width: int, random: np.random.Generator) -> Array:
    """Return two areas, one above the other, each with a gradient of its own."""
    image = np.empty((height, width, 3), np.float32)
    horizon = int(height * random.uniform(0.35, 0.75))
    for part in (image[:horizon], image[horizon:]):
        colors = random.uniform(60, 200, (2, 3))
        share = np.linspace(0, 1, len(part))[:, np.newaxis]
        part[...] = (colors[0] * (1 - share) + colors[1] * share)[:, np.newaxis]
    pixels: Array = image.astype(np.uint8)
    return pixels


def _draw(image: Array, label: int, random: np.random.Generator) -> None:
    height, width = image.shape[:2]
    size = min(height, width) * random.uniform(0.28, 0.45)
    center = np.array([width, height]) * random.uniform(0.42, 0.58, 2)
    turn = np.deg2rad(random.uniform(-12, 12))
    flip = random.choice([-1.0, 1.0])
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])

    def placed(points: Any) -> Array:
        there = np.asarray(points) * [flip, 1.0] @ rotation.T * size + center
        moved: Array = np.round(there * (1 << SUBPIXEL)).astype(np.int32)
        return moved

    for outline in CAR if label == 0 else BOAT:
        cv2.fillPoly(image, [placed(outline)], _color(random), cv2.LINE_AA, SUBPIXEL)
    for wheel in placed(WHEELS) if label == 0 else ():
        for share in (0.2, 0.09):
            radius = round(size * share * (1 << SUBPIXEL))
            cv2.circle(
                image,
                (int(wheel[0]), int(wheel[1])),
                radius,
                _color(random),
                -1,
                cv2.LINE_AA,
                SUBPIXEL,
            )


def _color(random: np.random.Generator) -> tuple[int, int, int]:
    blue, green, red = (int(part) for part in random.integers(0, 256, 3))
    return blue, green, red
