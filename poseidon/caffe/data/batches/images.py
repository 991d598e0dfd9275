"""Batches of images from a list, whose lines are a path and an integer label.

Law: a batch is a pure function of its number (and of list, share, transform and seed). The error
for an image that cannot be read names the list and the line.

Source: caffe's ImageDataLayer and ReadImageToCVMat: channels in BGR order, resizing by bilinear
interpolation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.base.foreign_files import read_definition
from poseidon.caffe.data.batches.claimed_size import check_claim
from poseidon.caffe.data.batches.lists import (
    Indices,
    RecordOrder,
    is_integer,
    read_label,
    read_list_lines,
)
from poseidon.caffe.data.batches.numbered import BatchPlan, Maker
from poseidon.caffe.data.batches.prefetch import BufferPool, DecoderPool, skipped_records
from poseidon.caffe.data.batches.transform import planes
from poseidon.errors import DataError
from poseidon.exchange.device import device_of

Bytes = npt.NDArray[np.uint8]
LARGEST_IMAGE = 1 << 30


class Line(NamedTuple):
    """A line of a list. A tuple with a string, because a list can have millions of lines."""

    number: int
    path: str
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan(BatchPlan):
    """The batches to read of a list.

    Attributes:
        size: height and width to resize every image to; None: no resizing.
        color: True for three channels, False for one.
        shuffle: read each epoch in a different order.
    """

    size: tuple[int, int] | None = None
    color: bool = True
    shuffle: bool = False


def read_list(source: Path, root: str, *, most: int | None = None, hint: str = "") -> list[Line]:
    """Read the lines of a list file.

    Args:
        source: the file; a line is a path, spaces or tabs, and the label.
        root: the prefix of each path (`root_folder`).
        most: the maximum number of lines to read; None: all.
        hint: the end of the sentence about a line without a label, such as what else the list may
            be.

    Raises:
        DataError: the file cannot be read, is empty, or has a line without a label.
    """
    lines: list[Line] = []
    for number, line in read_list_lines(source)[:most]:
        path, text = ("", *line.rsplit(maxsplit=1))[-2:]
        label = read_label(text, f"{source}:{number}")
        if not path or label is None:
            raise DataError(
                f"{source}:{number}: '{line[:80]}' is not a path and a label, such as: cats/1.jpg "
                f"0{hint}"
            )
        lines.append(Line(number, root + path, label))
    return lines


def missing_hint(root: str, path: str) -> str:
    """Return what to add to the error for an image of a list that is not there; else nothing.

    Args:
        path: of the image, as the list has it.
    """
    if Path(root + path).exists():
        return ""
    image, _, last = path.rpartition(" ")
    if image and is_integer(last):
        return f"; a line has one label, and '{last}' is probably a second label"
    lacks_slash = root and not root.endswith("/") and Path(root).is_dir()
    return f"; end the folder with a slash: {root}/" if lacks_slash else ""


def read_image(path: Path, *, color: bool, size: tuple[int, int] | None = None) -> Bytes:
    """Read an image file as (C, H, W), channels in BGR order.

    Args:
        color: True for three channels, False for one, whatever the file has.
        size: height and width to resize it to; None: no resizing.

    Raises:
        DataError: the file is missing, damaged or of an unknown format. The text names it.
    """
    if not path.is_file():
        raise DataError(f"there is no image {path}")
    try:
        content = read_definition(path, most_bytes=LARGEST_IMAGE)
    except OSError as error:
        raise DataError(f"the image {path} cannot be read: {error.strerror}") from error
    return planes(resized(decoded(content, path, color=color), size))


def decoded(content: bytes, path: Path, *, color: bool) -> Any:
    """Decode the content of an image file to (H, W, 3), channels in BGR order, or (H, W).

    Raises:
        DataError: the file is damaged or of an unknown format. The text names it.
    """
    try:
        check_claim(content)
        flag = cv2.IMREAD_COLOR if color else cv2.IMREAD_GRAYSCALE
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), flag) if content else None
    except DataError as error:
        raise DataError(f"the image {path} cannot be decoded: {error}") from error
    except cv2.error as error:
        raise DataError(f"the image {path} cannot be decoded: {error.err}") from error
    if pixels is None:
        raise DataError(
            f"the image {path} cannot be decoded: it is damaged, or of an unknown format"
        )
    return pixels


def resized(pixels: npt.NDArray[Any], size: tuple[int, int] | None) -> npt.NDArray[Any]:
    """Resize an image (H, W) or (H, W, C) to height and width `size`, by bilinear interpolation."""
    if size is None or pixels.shape[:2] == size:
        return pixels
    return cv2.resize(pixels, (size[1], size[0]))


class NumberedLine(Protocol):
    """A line of any list, with its number from 1."""

    @property
    def number(self) -> int: ...


L = TypeVar("L", bound=NumberedLine)


class ListMaker(Maker, Generic[L]):
    """The base class of makers of batches from the lines of a list.

    Raises:
        DataError: rand_skip exceeds the list.
    """

    def __init__(self, source: Path, lines: list[L], plan: ImagePlan) -> None:
        super().__init__(plan.share, plan.batch_size)
        self._source, self._lines, self._plan = source, lines, plan
        self._skipped = skipped_records(plan.seed, plan.rand_skip)
        if self._skipped >= len(lines):
            raise DataError(
                f"rand_skip skips {self._skipped} lines, but the list {source} has only "
                f"{len(lines)}"
            )
        self._order = RecordOrder([len(lines)], shuffle=plan.shuffle, seed=plan.seed)
        self._decoders = DecoderPool()

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Stop the decoding threads."""
        self._decoders.close()

    def _line(self, n: int) -> L:
        """Return this reader's n-th line."""
        return self._lines[self._order.record(self._plan.share.record(n) + self._skipped)]

    def _first_line(self) -> L:
        """Return the first line that any reader of the list reads: its image gives all of them
        one shape.
        """
        return self._lines[self._order.record(self._skipped)]

    def _batch(self, number: int) -> tuple[list[L], Indices]:
        """Return the lines of a batch, and the numbers of these records in the job."""
        first, size = number * self._plan.batch_size, self._plan.batch_size
        lines = [self._line(n) for n in range(first, first + size)]
        return lines, self._plan.share.job_records(first, size)

    def _location(self, line: L) -> str:
        return f"{self._source}:{line.number}"

    @contextmanager
    def _located(self, line: L) -> Iterator[None]:
        """Add list and line to the errors of an image."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._location(line)}: {error}") from error


class ImageMaker(ListMaker[Line]):
    """A `Maker` of batches of a list's images: data (N, C, h, w) and labels (N).

    Raises:
        DataError: the first image cannot be read or transformed, or rand_skip exceeds the list.
    """

    def __init__(self, source: Path, lines: list[Line], plan: ImagePlan) -> None:
        super().__init__(source, lines, plan)
        first = self._first_line()
        self.shape = (plan.batch_size, *self._output_shape(self._image(first), first))
        kind = torch.uint8 if plan.sends_bytes else torch.float32
        self._buffers = BufferPool(self.shape, kind, device_of(plan.device))
        self.transform = plan.transform if plan.sends_bytes else None

    def tensors(self, number: int) -> tuple[Tensor, ...]:
        plan = self._plan
        lines, records = self._batch(number)
        draws = plan.transform.draws(plan.seed, records)
        images = self._decoders.map(self._image, lines)
        shape = self._output_shape(images[0], lines[0])
        data = (
            self._buffers.take()
            if shape == self.shape[1:]
            else np.empty((len(lines), *shape), np.uint8 if plan.sends_bytes else np.float32)
        )
        places = np.zeros((len(lines), 3), np.int64)
        for line, image, choice, target, place in zip(
            lines, images, draws, data, places, strict=True
        ):
            outcome = self._output_shape(image, line)
            if outcome != shape:
                raise DataError(
                    f"{self._location(line)}: image of {_shape_text(outcome)} in a batch whose "
                    f"first is {_shape_text(shape)}; set new_height and new_width, or batch_size: 1"
                )
            if plan.sends_bytes:
                place[:] = plan.transform.crop_into(image, choice, target)
            else:
                plan.transform.one(image, choice, target)
        made = [data, places] if plan.sends_bytes else [data]
        labels = np.array([line.label for line in lines], np.float32)
        return tuple(map(torch.from_numpy, [*made, labels]))

    def _image(self, line: Line) -> Bytes:
        try:
            return read_image(Path(line.path), color=self._plan.color, size=self._plan.size)
        except DataError as error:
            raise DataError(
                f"{self._location(line)}: {error}{missing_hint('', line.path)}"
            ) from error

    def _output_shape(self, image: Bytes, line: Line) -> tuple[int, int, int]:
        with self._located(line):
            return self._plan.transform.output_shape(image.shape)


def _shape_text(shape: tuple[int, int, int]) -> str:
    return "{} x {} x {} (channels x height x width)".format(*shape)
