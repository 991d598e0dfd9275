"""Conversion of images with annotations to a database of AnnotatedDatum records, as by SSD's
convert_annoset.

Law: as for `imageset`: the record of line i (after the shuffle, if any) has the key `<i>_<path>`, i
with eight digits; a file that cannot be read is an error that names the line; the database appears
when it is complete.

Source: tools/convert_annoset.cpp of SSD's branch of Caffe (Liu et al., 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from poseidon.base.durable import write_whole
from poseidon.caffe.data.annotated import encode_annotated
from poseidon.caffe.data.augment.boxes import Object
from poseidon.caffe.data.batches.claimed_size import check_claim
from poseidon.caffe.data.batches.images import missing_hint, read_list
from poseidon.caffe.data.batches.lists import read_lines
from poseidon.caffe.data.databases.kinds import Backend
from poseidon.caffe.data.label_map import check_unique, labels_of, read_label_map
from poseidon.caffe.data.prepare.annotations import AnnotationFormat, read_objects, size_lines
from poseidon.caffe.data.prepare.imageset import Conversion, Made, to_datum, written
from poseidon.caffe.data.progress_reports import Report, silent
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum
from poseidon.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations:
    """The annotations of a set.

    Attributes:
        form: the format of the annotation files; None: the list has labels of whole images.
        label_map: the file with the label of each name, for formats with names.
        check_label: refuse a label map with a name or label that occurs twice.
    """

    form: AnnotationFormat | None
    label_map: Path | None = None
    check_label: bool = False


class _Line(NamedTuple):
    """A line of the list: an image with its annotation file, or with a label."""

    number: int
    path: str
    annotation: str
    label: int


def convert_annoset(
    root: str,
    source: Path,
    path: Path,
    backend: Backend,
    conversion: Conversion,
    annotations: Annotations,
    *,
    name_size_file: Path | None = None,
    report: Report = silent,
) -> int:
    """Write the images of a list with their annotations to a new database.

    Args:
        root: the prefix of each path of the list.
        source: the list; a line is an image, a space and its annotation file (or its label).
        path: the new database.
        backend: the kind of database.
        conversion: the options for the images.
        annotations: the annotations.
        name_size_file: a file that gets name, height and width of each image; None: none.
        report: called with the number of records written, for a progress bar.

    Returns:
        the number of records.

    Raises:
        DataError: an annotation or all images cannot be read, a name has no label, sizes differ and
            `check_size` is set, or the database exists.
    """
    labels: Mapping[str, int] = {}
    if annotations.label_map is not None and annotations.form is not None:
        label_map = read_label_map(annotations.label_map)
        if annotations.check_label:
            check_unique(label_map, annotations.label_map)
        labels = labels_of(label_map)
    lines = _lines(source, with_files=annotations.form is not None)
    make = partial(_record, root, source, conversion, annotations.form, labels)
    sizes = [
        (Path(line.path).stem, *made.size)
        for line, made in written(source, lines, make, path, backend, conversion, report)
    ]
    if name_size_file is not None:
        _write(name_size_file, size_lines(sizes))
    return len(sizes)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode("utf-8", errors="surrogateescape"))
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def _lines(source: Path, *, with_files: bool) -> list[_Line]:
    if not with_files:
        hint = "; a list of annotations needs --anno_type=detection"
        return [
            _Line(line.number, line.path, "", line.label)
            for line in read_list(source, "", hint=hint)
        ]
    lines = []
    for number, line in enumerate(read_lines(source, "list"), 1):
        words = line.split()
        if words and len(words) != 2:
            raise DataError(
                f"{source}:{number}: '{line[:80]}' is not an image and its annotation, such as: "
                "images/1.jpg annotations/1.xml"
            )
        if words:
            lines.append(_Line(number, words[0], words[1], 0))
    if not lines:
        raise DataError(f"the list {source} is empty")
    return lines


def _record(
    root: str,
    source: Path,
    conversion: Conversion,
    form: AnnotationFormat | None,
    labels: Mapping[str, int],
    line: _Line,
) -> Made:
    try:
        image = Path(root + line.path)
        datum = to_datum(image, line.label, conversion)
        size = _size(image)
        values = 0 if datum.encoded else len(datum.data)
        if form is None:
            return Made(AnnotatedDatum(datum=datum).SerializeToString(), values, size)
        objects: Sequence[Object] = read_objects(Path(root + line.annotation), form, size, labels)
        return Made(encode_annotated(datum, objects), values, size)
    except DataError as error:
        raise type(error)(
            f"{source}:{line.number}: {error}{missing_hint(root, line.path)}"
        ) from error


def _size(path: Path) -> tuple[int, int]:
    """Return height and width of an image file that can be decoded."""
    content = path.read_bytes()
    check_claim(content)
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert pixels is not None
    return pixels.shape[0], pixels.shape[1]
