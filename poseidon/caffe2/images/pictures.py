"""Databases of labelled picture files, in Caffe2's or in Caffe's format: `poseidon make_db`.

Law: the database appears when it is complete. A picture that cannot be read is an error that names
it. The key of record i is `<i>_<path>`, i with eight digits, so that key order is the order of the
records.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from poseidon.caffe.data.batches.images import read_list
from poseidon.caffe.data.batches.lists import permutation
from poseidon.caffe.data.datum import encode_file
from poseidon.caffe.data.prepare.imageset import (
    CLASS_NAMES,
    Conversion,
    draw_labels,
    draw_picture,
    in_parallel,
    to_datum,
)
from poseidon.caffe.data.staging import Report, silent
from poseidon.caffe2.images.records import encode
from poseidon.caffe2.runtime.databases import new_database
from poseidon.errors import DataError

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""The files of a folder that are taken for pictures."""
FORMATS = ("caffe2", "caffe")
"""TensorProtos, Datum."""
MAX_PATH_IN_KEY = 400
"""Bytes; LMDB's keys have up to 511."""


class Picture(NamedTuple):
    """A picture file: where a mistake is reported, its path as given, the file, its label."""

    place: str
    name: str
    file: Path
    label: int


@dataclass(frozen=True, slots=True)
class Pictures:
    """Labelled picture files.

    Attributes:
        files: in order.
        classes: the names of the labels, 0 first; empty where they have none.
    """

    files: Sequence[Picture]
    classes: Sequence[str] = ()

    def counts(self) -> dict[str, int]:
        """Return the number of pictures of each class, or label."""
        found: dict[str, int] = {}
        for picture in sorted(self.files, key=lambda each: each.label):
            name = f"{picture.label}" + (f" {self.classes[picture.label]}" if self.classes else "")
            found[name] = found.get(name, 0) + 1
        return found


def find_pictures(source: Path, root: str | None = None) -> Pictures:
    """Return the pictures of a folder or a list.

    Args:
        source: a folder with one sub-folder for each class, whose labels follow the order of their
            names; or a file with a line for each picture: path, space, label.
        root: of a list, what stands before each path; None: its own folder.

    Raises:
        DataError: there are no pictures, a class has none, or a line has no label.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist: expected a folder of class folders, or a list")
    if not source.is_dir():
        prefix = f"{source.parent}/" if root is None else root
        return Pictures(
            [
                Picture(
                    f"{source}:{line.number}: ", line.path, Path(prefix + line.path), line.label
                )
                for line in read_list(source, "")
            ]
        )
    folders = sorted(p for p in source.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise DataError(f"{source} has no sub-folders: expected one for each class")
    files = []
    for label, folder in enumerate(folders):
        found = sorted(
            path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        if not found:
            raise DataError(f"{folder} has no pictures such as .jpg or .png in its sub-folders")
        files += [Picture("", str(path.relative_to(source)), path, label) for path in found]
    return Pictures(files, [folder.name for folder in folders])


def make_database(
    pictures: Pictures,
    path: Path,
    db_type: str,
    form: str,
    conversion: Conversion,
    *,
    report: Report = silent,
) -> int:
    """Write pictures to a new database; return the number of records.

    Args:
        pictures: the files.
        path: the new database.
        db_type: lmdb, leveldb or minidb.
        form: one of `FORMATS`.
        conversion: size, channels, encoding; the order, with `shuffle`.
        report: called with the number of records written, for a progress bar.

    Raises:
        DataError: a picture cannot be read, or the database exists.
    """
    files = list(pictures.files)
    if conversion.shuffle:
        files = [files[index] for index in permutation(conversion.seed, 0, len(files))]
    with new_database(path, db_type) as writer:
        for number, (picture, value) in enumerate(
            in_parallel(partial(_record, form, conversion), files)
        ):
            writer.put(_key(number, picture.name), value)
            report("converting", number + 1, len(files))
    return len(files)


def make_two_class(
    path: Path,
    db_type: str,
    form: str,
    count: int,
    *,
    seed: int,
    first: int = 0,
    report: Report = silent,
) -> int:
    """Write drawn pictures of two classes to a new database; return the number of records.

    Args:
        path, db_type, form: see `make_database`.
        count: the number of pictures, half of each class.
        seed: of the drawings.
        first: the number of the first one; pictures of other numbers are others.
        report: called with the number of records written.

    Raises:
        DataError: the database exists.
    """
    labels = draw_labels(count, seed=seed + first)

    def record(number: int) -> bytes:
        number, label = first + number, int(labels[number])
        content = draw_picture(number, label, seed=seed)
        return encode(content, label) if form == "caffe2" else encode_file(content, label)

    with new_database(path, db_type) as writer:
        for number, value in in_parallel(record, range(count)):
            writer.put(_key(number, f"{CLASS_NAMES[labels[number]]}.jpg"), value)
            report(f"drawing {path.name}", number + 1, count)
    return count


def _key(number: int, name: str) -> bytes:
    return b"%08d_%s" % (number, os.fsencode(name)[-MAX_PATH_IN_KEY:])


def _record(form: str, conversion: Conversion, picture: Picture) -> bytes:
    try:
        datum = to_datum(picture.file, picture.label, conversion)
    except DataError as error:
        raise DataError(f"{picture.place}{error}") from error
    if form == "caffe":
        return datum.SerializeToString()
    if datum.encoded:
        return encode(datum.data, datum.label)
    planes = np.frombuffer(datum.data, np.uint8).reshape(datum.channels, datum.height, datum.width)
    pixels = planes[0] if datum.channels == 1 else np.ascontiguousarray(planes.transpose(1, 2, 0))
    return encode(pixels, datum.label)
