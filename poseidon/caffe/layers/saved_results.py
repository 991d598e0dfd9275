"""Files with the detections of a test set: save_output_param of a DetectionOutput layer.

Law: the files are written when the last of num_test_image images is done. The next pass replaces
them. In a job of several workers each keeps the detections of its batches, and worker 0 writes
all detections at the end of a pass, in the order of batches: one process writes the same files.

Formats: VOC, a file <prefix><class>.txt for each class with lines `name score xmin ymin xmax ymax`;
ILSVRC, one file <prefix>.txt with lines `name label score xmin ymin xmax ymax`; COCO, one file
<prefix>.json, a list of image_id, category_id, bbox (x, y, width, height) and score. Coordinates
are pixels of the original image, whose name and size are a line `name height width` of
name_size_file.

Source: detection_output_layer.cpp of SSD's branch of Caffe. SSD empties
output_directory first; here other files in it stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from poseidon.caffe.data.augmentation import Resize
from poseidon.caffe.data.batches.lists import read_list_lines
from poseidon.caffe.data.boxes import Box
from poseidon.caffe.data.datum import names_of, read_label_map
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.layers.matching import Floats
from poseidon.caffe.proto.caffe_pb2 import DetectionOutputParameter
from poseidon.errors import DataError

FORMATS = ("VOC", "COCO", "ILSVRC")
COLUMNS = 7


class ImageSize(NamedTuple):
    """A line of name_size_file."""

    name: str
    height: int
    width: int


class SavedDetection(NamedTuple):
    """A detection as it is written."""

    image: str
    label: int
    score: float
    x: float
    y: float
    width: float
    height: float

    @property
    def corners(self) -> tuple[int, int, int, int]:
        """The corners in whole pixels, from the rounded position and size."""
        return (
            int(self.x),
            int(self.y),
            int(self.x) + int(self.width),
            int(self.y) + int(self.height),
        )


def read_sizes(path: Path) -> list[ImageSize]:
    """Read a name_size_file.

    Raises:
        DataError: the file cannot be read, is empty, or has a line of a different form.
    """
    sizes = []
    for number, line in read_list_lines(path, "name_size_file"):
        words = line.split()
        if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words[1:]):
            raise DataError(f"{path}:{number}: '{line[:80]}' is not a name, a height and a width")
        sizes.append(ImageSize(words[0], int(words[1]), int(words[2])))
    return sizes


def original_box(box: Box, size: ImageSize, resize: Resize | None) -> Box:
    """Return a box of a net's input in pixels of the original image."""
    box = resize.unmoved(box, size.height, size.width) if resize is not None else box.clipped()
    return Box(
        box.xmin * size.width, box.ymin * size.height, box.xmax * size.width, box.ymax * size.height
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The files to write.

    Attributes:
        form: one of FORMATS.
        names: the name of each label.
        background: the label that has no file.
    """

    folder: Path
    prefix: str
    form: str
    names: Mapping[int, str]
    background: int
    classes: int


class SavedResults:
    """The detections of a test set, image by image.

    Args:
        sizes: the images of a pass, in the order of the data layer.
        resize: the resizing of the images; None: they were only warped.
    """

    def __init__(self, target: Target, sizes: list[ImageSize], resize: Resize | None) -> None:
        self._target = target
        self._sizes = sizes
        self._resize = resize
        self._images = 0
        self._found: list[SavedDetection] = []

    def add(self, rows: Floats) -> None:
        """Add the detections of the next image: (detections, 7), as in the layer's top."""
        size = self._sizes[self._images]
        for _, label, score, *corners in rows.tolist():
            box = original_box(Box(*corners), size, self._resize)
            if int(label) not in self._target.names:
                raise DataError(f"label {int(label)} is not in the label map")
            numbers = (box.xmin, box.ymin, box.xmax - box.xmin, box.ymax - box.ymin)
            self._found.append(
                SavedDetection(
                    size.name, int(label), score, *(round(number * 100) / 100 for number in numbers)
                )
            )
        self._images += 1
        if self._images == len(self._sizes):
            self._write()

    def close(self) -> None:
        """Write the detections of a pass that has not ended."""
        if self._images:
            self._write()

    def _write(self) -> None:
        found, self._found, self._images = self._found, [], 0
        for name, content in contents(self._target, found).items():
            path = self._target.folder / name
            try:
                path.write_text(content, encoding="utf-8", errors="surrogateescape")
            except OSError as error:
                raise DataError(
                    f"the detections cannot be written to {path}: {error.strerror}"
                ) from error


def contents(target: Target, found: list[SavedDetection]) -> dict[str, str]:
    """Return the content of each file."""
    names = target.names
    if target.form == "VOC":
        labels = [
            label
            for label in range(target.classes)
            if label != target.background and label in names
        ]
        return {
            f"{target.prefix}{names[label]}.txt": "".join(
                "{} {:g} {} {} {} {}\n".format(item.image, item.score, *item.corners)
                for item in found
                if item.label == label
            )
            for label in labels
        }
    if target.form == "ILSVRC":
        lines = (
            "{} {} {:g} {} {} {} {}\n".format(item.image, item.label, item.score, *item.corners)
            for item in found
        )
        return {f"{target.prefix}.txt": "".join(lines)}
    records = [
        {
            "image_id": _number_or_text(item.image),
            "category_id": _number_or_text(names[item.label]),
            "bbox": [item.x, item.y, item.width, item.height],
            "score": float(f"{item.score:.9g}"),
        }
        for item in found
    ]
    return {f"{target.prefix}.json": json.dumps(records, indent=4) + "\n"}


def _number_or_text(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


def pack_batches(batches: Sequence[Sequence[Floats]]) -> bytes:
    """Return the detections (detections, 7) of each image of each batch as bytes."""
    images = [rows for batch in batches for rows in batch]
    sizes = [len(batches), *map(len, batches), *map(len, images)]
    values = np.concatenate([np.zeros(0, np.float32), *(rows.ravel() for rows in images)])
    return np.array(sizes, "<i8").tobytes() + values.astype("<f4").tobytes()


def unpack_batches(payload: bytes) -> list[list[Floats]]:
    """Return what `pack_batches` packed."""
    number = int(np.frombuffer(payload, "<i8", 1)[0])
    counts = np.frombuffer(payload, "<i8", number, 8).tolist()
    lengths = np.frombuffer(payload, "<i8", sum(counts), 8 * (1 + number))
    rows = np.frombuffer(payload, "<f4", offset=8 * (1 + number + len(lengths))).reshape(
        -1, COLUMNS
    )
    images = iter(np.split(rows, np.cumsum(lengths)[:-1]) if len(lengths) else [])
    return [[next(images) for _ in range(count)] for count in counts]


def asks_for_results(param: DetectionOutputParameter) -> bool:
    """Return True if a definition has a folder, a label map and a name_size_file."""
    save = param.save_output_param
    return bool(save.output_directory and save.label_map_file and save.name_size_file)


def open_results(param: DetectionOutputParameter, resolve: Callable[[str], Path]) -> SavedResults:
    """Return the results that a definition asks for.

    Raises:
        LayerError: the format is unknown, or num_test_image exceeds the file.
        DataError: a file cannot be read, or the folder not be created.
    """
    save = param.save_output_param
    if save.output_format not in FORMATS:
        raise LayerError(f"output_format is '{save.output_format}', expected {', '.join(FORMATS)}")
    sizes = read_sizes(resolve(save.name_size_file))
    count = save.num_test_image if save.HasField("num_test_image") else len(sizes)
    if not 0 < count <= len(sizes):
        raise LayerError(f"num_test_image is {count}, but name_size_file has {len(sizes)} images")
    folder = Path(save.output_directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"output_directory {folder} cannot be created: {error.strerror}") from error
    target = Target(
        folder=folder,
        prefix=save.output_name_prefix,
        form=save.output_format,
        names=names_of(read_label_map(resolve(save.label_map_file))),
        background=param.background_label_id,
        classes=param.num_classes,
    )
    resize = Resize(save.resize_param) if save.HasField("resize_param") else None
    return SavedResults(target, sizes[:count], resize)
