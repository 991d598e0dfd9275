"""Annotation files of images: the objects in PASCAL VOC's XML, in JSON and in text.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from poseidon.base.foreign_files import read_definition
from poseidon.base.text_files import decoded
from poseidon.caffe.data.augment.boxes import Box, Object
from poseidon.caffe.data.batches.lists import read_label
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
        path: the annotation file.
        form: its format.
        size: height and width of the image, for files that do not have them.
        labels: the label of each name.

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
