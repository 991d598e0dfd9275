"""Conversion of annotated images to a database of AnnotatedDatum, as convert_annoset does.

Law: as for `imageset`: the record of line i (after the shuffle, if any) has the key `<i>_<path>`, i
with eight digits; a file that cannot be read is an error that names the line; the database appears
when it is complete.

Source: tools/convert_annoset.cpp of SSD's branch of Caffe (Liu et al., 2016).

Annotation files of images: the objects in PASCAL VOC's XML, in JSON and in text.

Law: boxes become fractions of the annotated image's width and height. Instances of a label are
numbered in order.

Formats:
    xml: PASCAL VOC and ILSVRC: <annotation> with <size> (height, width) and for each <object> name,
        difficult and <bndbox> (xmin, ymin, xmax, ymax) in pixels;
    json: as SSD has it for COCO: {"image": {"height", "width"}, "annotation": [{"category_id",
    "bbox": [x, y, width,
        height], "iscrowd"}, ...]}; what is a crowd is difficult;
    txt: a line for each object: label xmin ymin xmax ymax, in pixels.

Source: ReadXMLToAnnotatedDatum, ReadJSONToAnnotatedDatum and ReadTxtToAnnotatedDatum in util/io.cpp
of SSD's branch of Caffe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import decoded
from poseidon.caffe.data.batches.claimed_size import check_claim
from poseidon.caffe.data.batches.images import missing_hint, read_list
from poseidon.caffe.data.batches.lists import read_label, read_list_lines
from poseidon.caffe.data.boxes import Box, Object
from poseidon.caffe.data.databases import Backend
from poseidon.caffe.data.datum import check_unique, encode_annotated, labels_of, read_label_map
from poseidon.caffe.data.prepare.imageset import Conversion, Made, to_datum, written
from poseidon.caffe.data.staging import Report, silent
from poseidon.caffe.proto.caffe_pb2 import AnnotatedDatum
from poseidon.errors import DataError, nearest

SIDES = ("xmin", "ymin", "xmax", "ymax")


class AnnotationFormat(Enum):
    """The format of annotation files."""

    XML = "xml"
    """PASCAL VOC."""
    JSON = "json"
    """COCO, one file for each image."""
    TXT = "txt"
    """Label and corners in each line."""

    @property
    def has_names(self) -> bool:
        """True if objects have names, so that a label map is needed."""
        return self is not AnnotationFormat.TXT


class Marked(NamedTuple):
    """An object as a file has it: its label or name, corners in pixels."""

    label: int | str
    corners: tuple[float, float, float, float]
    difficult: bool


class MarkedImage(NamedTuple):
    """The content of a file. The size is height and width; None if the file does not have it."""

    size: tuple[int, int] | None
    marked: list[Marked]


def read_objects(
    path: Path, form: AnnotationFormat, size: tuple[int, int], labels: Mapping[str, int]
) -> list[Object]:
    """Read the objects of an image.

    Args:
        size: height and width of the image, for files that do not have them.

    Raises:
        DataError: the file cannot be read or has a different form, or a name has no label. The text
            names the file.
    """
    found = read_marked(path, form)
    with _located(path):
        return _objects(found, size, labels)


def read_marked(path: Path, form: AnnotationFormat) -> MarkedImage:
    """Return the content of an annotation file.

    Raises:
        DataError: the file cannot be read or has a different form. The text names the file.
    """
    try:
        content = read_definition(path)
    except OSError as error:
        raise DataError(f"the annotation {path} cannot be read: {error.strerror}") from error
    with _located(path):
        return _READERS[form](content)


@contextmanager
def _located(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"the annotation {path}: {error}") from error


def _objects(found: MarkedImage, size: tuple[int, int], labels: Mapping[str, int]) -> list[Object]:
    height, width = found.size or size
    if min(height, width) < 1:
        raise DataError(f"the size is {width} x {height}, expected at least 1 x 1")
    seen: Counter[int] = Counter()
    objects = []
    for label, (xmin, ymin, xmax, ymax), difficult in found.marked:
        number = _label(label, labels) if isinstance(label, str) else label
        if xmax < xmin or ymax < ymin:
            raise DataError(f"the box {xmin:g} {ymin:g} {xmax:g} {ymax:g} ends before it starts")
        box = Box(xmin / width, ymin / height, xmax / width, ymax / height)
        objects.append(Object(number, seen[number], box, difficult))
        seen[number] += 1
    return objects


def _label(name: str, labels: Mapping[str, int]) -> int:
    if name not in labels:
        near = nearest(name, labels)
        raise DataError(
            f"'{name[:80]}' is not in the label map" + (f"; did you mean '{near}'?" if near else "")
        )
    return labels[name]


def _xml(content: bytes) -> MarkedImage:
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        # also for an encoding that is unknown
        raise DataError(f"it is not XML: {error}") from error
    height, width = root.findtext("size/height"), root.findtext("size/width")
    size = None
    if height is not None and width is not None:
        size = (int(_number(height)), int(_number(width)))
    marked = []
    for item in root.iter("object"):
        name = item.findtext("name")
        if name is None:
            raise DataError("an object has no name")
        texts = [item.findtext(f"bndbox/{side}") for side in SIDES]
        corners = tuple(_number(value) if value is not None else _missing(name) for value in texts)
        difficult = (item.findtext("difficult") or "").strip() == "1"
        marked.append(Marked(name.strip(), corners, difficult))  # type: ignore[arg-type]
    return MarkedImage(size, marked)


def _missing(name: str) -> float:
    raise DataError(f"the object '{name[:80]}' has no bndbox with {', '.join(SIDES)}")


def _json(content: bytes) -> MarkedImage:
    try:
        found = json.loads(content)
        size = (int(found["image"]["height"]), int(found["image"]["width"]))
        marked = []
        for item in found["annotation"]:
            x, y, width, height = (_number(value) for value in item["bbox"])
            crowd = bool(int(item.get("iscrowd", 0)))
            marked.append(Marked(str(item["category_id"]), (x, y, x + width, y + height), crowd))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise DataError(
            'it is not JSON with "image": {"height", "width"} and "annotation": [{"category_id", '
            '"bbox"}, ...]'
        ) from error
    return MarkedImage(size, marked)


def _txt(content: bytes) -> MarkedImage:
    try:
        lines = decoded(content).split("\n")
    except UnicodeDecodeError as error:
        raise DataError("it is not text") from error
    marked = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        label = read_label(words[0], f"line {number}")
        if len(words) != 1 + len(SIDES) or label is None:
            raise DataError(f"line {number}: '{line[:80]}' is not a label and four numbers")
        xmin, ymin, xmax, ymax = (_number(word) for word in words[1:])
        marked.append(Marked(label, (xmin, ymin, xmax, ymax), difficult=False))
    return MarkedImage(None, marked)


def _number(value: Any) -> float:
    """Return a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"'{str(value)[:80]}' is not a number") from error
    if not abs(number) < 1e9:
        raise DataError(f"{number:g} is not a position in an image")
    return number


_READERS: dict[AnnotationFormat, Callable[[bytes], MarkedImage]] = {
    AnnotationFormat.XML: _xml,
    AnnotationFormat.JSON: _json,
    AnnotationFormat.TXT: _txt,
}


def size_lines(sizes: Iterable[tuple[str, int, int]]) -> str:
    """Return the text of a name_size_file: name, height and width in each line."""
    return "".join(f"{name} {height} {width}\n" for name, height, width in sizes)


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
    """Write the images of a list with their annotations to a new database. Return the number of
    records.

    Args:
        root: the prefix of each path of the list.
        source: the list; a line is an image, a space and its annotation file (or its label).
        path: the new database.
        name_size_file: a file that gets name, height and width of each image; None: none.
        report: called with the number of records written, for a progress bar.

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
    for number, line in read_list_lines(source):
        words = line.split()
        if len(words) != 2:
            raise DataError(
                f"{source}:{number}: '{line[:80]}' is not an image and its annotation, such as: "
                "images/1.jpg annotations/1.xml"
            )
        lines.append(_Line(number, words[0], words[1], 0))
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
