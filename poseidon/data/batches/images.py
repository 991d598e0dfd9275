"""Batches of images from a list, whose lines are a path and an integer label.

Law: a batch is a pure function of its number (and of list, share, transform and seed). The error
for an image that cannot be read names the list and the line.

Source: caffe's ImageDataLayer and ReadImageToCVMat: channels in BGR order, resizing by bilinear
interpolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.batches.buffers import BufferPool
from poseidon.data.batches.claimed_size import check_claim
from poseidon.data.batches.draws import skipped_records
from poseidon.data.batches.labels import is_integer, read_label
from poseidon.data.batches.lists import Order, read_lines
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share
from poseidon.data.batches.prefetch import DecoderPool
from poseidon.data.batches.transform import Transform, planes
from poseidon.errors import DataError

Bytes = npt.NDArray[np.uint8]


class Line(NamedTuple):
    """A line of a list. A tuple with a string, because a list can have millions of lines."""

    number: int
    path: str
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The batches to read.

    Attributes:
        batch_size: N.
        transform: crop, mirror, mean, scale.
        share: the lines of this worker.
        seed: the seed of the job.
        size: height and width to resize every image to; None: no resizing.
        color: True for three channels, False for one.
        shuffle: read each epoch in a different order.
        rand_skip: start at a random line below this; 0: at the first.
    """

    batch_size: int
    transform: Transform
    share: Share
    seed: int
    size: tuple[int, int] | None = None
    color: bool = True
    shuffle: bool = False
    rand_skip: int = 0


def read_list(source: Path, root: str, *, most: int | None = None, hint: str = "") -> list[Line]:
    """Read the lines of a list file.

    Args:
        source: the file; a line is a path, a space and the label.
        root: the prefix of each path (`root_folder`).
        most: the maximum number of lines to read; None: all.
        hint: the end of the sentence about a line without a label, such as what else the list may
            be.

    Raises:
        DataError: the file cannot be read, is empty, or has a line without a label.
    """
    lines: list[Line] = []
    for number, line in enumerate(read_lines(source, "list"), 1):
        if len(lines) == most:
            break
        if not line.strip():
            continue
        path, _, text = line.rstrip().rpartition(" ")
        label = read_label(text, f"{source}:{number}")
        if not path or label is None:
            raise DataError(
                f"{source}:{number}: '{line[:80]}' is not a path and a label, such as: cats/1.jpg "
                f"0{hint}"
            )
        lines.append(Line(number, root + path.rstrip(), label))
    if not lines:
        raise DataError(f"the list {source} is empty")
    return lines


def missing_hint(root: str, path: str) -> str:
    """Return what to add to the error for an image of a list that is not there; else nothing.

    Args:
        root: the prefix of the path.
        path: of the image, as the list has it.
    """
    if Path(root + path).exists():
        return ""
    image, _, last = path.rpartition(" ")
    if image and is_integer(last):
        return f"; a line has one label, and '{last}' before the last one seems to be another"
    lacks_slash = root and not root.endswith("/") and Path(root).is_dir()
    return f"; end the folder with a slash: {root}/" if lacks_slash else ""


def read_image(path: Path, *, color: bool, size: tuple[int, int] | None = None) -> Bytes:
    """Read an image file as (C, H, W), channels in BGR order.

    Args:
        path: the file.
        color: True for three channels, False for one, whatever the file has.
        size: height and width to resize it to; None: no resizing.

    Raises:
        DataError: the file is missing, damaged or of an unknown format. The text names it.
    """
    if not path.is_file():
        raise DataError(f"there is no image {path}")
    try:
        content = path.read_bytes()
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


class ImageMaker:
    """A `Maker` of batches of a list's images.

    Raises:
        DataError: the first image cannot be read or transformed, or rand_skip exceeds the list.
    """

    def __init__(self, source: Path, lines: list[Line], plan: ImagePlan) -> None:
        self._source = source
        self._lines = lines
        self._plan = plan
        self._skipped = _skipped(source, lines, plan)
        self._order = Order([len(lines)], shuffle=plan.shuffle, seed=plan.seed)
        self._decoders = DecoderPool()
        first = self._image(self._line(0))
        self._shape = self._output_shape(first, self._line(0))
        self._buffers = BufferPool((plan.batch_size, *self._shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (N, C, h, w) of the first batch; of every batch unless images differ in
        size.
        """
        return (self._plan.batch_size, *self._shape)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch `number` >= 0: images (N, C, h, w) and labels (N)."""
        plan = self._plan
        first = number * plan.batch_size
        lines = [self._line(n) for n in range(first, first + plan.batch_size)]
        draws = plan.transform.draws(plan.seed, plan.share.job_records(first, plan.batch_size))
        images = self._images(lines)
        shape = self._output_shape(images[0], lines[0])
        data = (
            self._buffers.take()
            if shape == self._shape
            else np.empty((len(lines), *shape), np.float32)
        )
        for line, image, choice, target in zip(lines, images, draws, data, strict=True):
            outcome = self._output_shape(image, line)
            if outcome != shape:
                raise DataError(
                    f"{self._location(line)}: image of {_shape_text(outcome)} in a batch whose "
                    f"first is {_shape_text(shape)}; set "
                    "new_height and new_width, or batch_size: 1"
                )
            plan.transform.one(image, choice, target)
        labels = np.array([line.label for line in lines], np.float32)
        return torch.from_numpy(data), torch.from_numpy(labels)

    def fresh_records(self, number: int) -> int:
        return self._plan.share.fresh_records(number, self._plan.batch_size, len(self._lines))

    def close(self) -> None:
        """Stop the decoding threads."""
        self._decoders.close()

    def _line(self, n: int) -> Line:
        """Return this reader's n-th line."""
        return self._lines[self._order.record(self._plan.share.record(n) + self._skipped)]

    def _images(self, lines: list[Line]) -> list[Bytes]:
        if len(lines) == 1:
            return [self._image(lines[0])]
        return self._decoders.map(self._image, lines)

    def _image(self, line: Line) -> Bytes:
        try:
            return read_image(Path(line.path), color=self._plan.color, size=self._plan.size)
        except DataError as error:
            raise DataError(
                f"{self._location(line)}: {error}{missing_hint('', line.path)}"
            ) from error

    def _output_shape(self, image: Bytes, line: Line) -> tuple[int, int, int]:
        try:
            return self._plan.transform.output_shape(image.shape)
        except DataError as error:
            raise DataError(f"{self._location(line)}: {error}") from error

    def _location(self, line: Line) -> str:
        return f"{self._source}:{line.number}"


class ImageReader(NumberedReader):
    """An endless reader of one worker's share of a list of images: data (N, C, h, w) and labels
    (N).

    Args:
        source: the list file, already this client's part.
        root: the prefix of each path of the list.
        plan: the batches to read.
    """

    def __init__(self, source: Path, root: str, plan: ImagePlan) -> None:
        super().__init__(source, ImageMaker(source, read_list(source, root), plan))


def _skipped(source: Path, lines: list[Line], plan: ImagePlan) -> int:
    """Return the number of lines to skip at the start."""
    skipped = skipped_records(plan.seed, plan.rand_skip)
    if skipped >= len(lines):
        raise DataError(
            f"rand_skip skips {skipped} lines, but the list {source} has only {len(lines)}"
        )
    return skipped


def _shape_text(shape: tuple[int, int, int]) -> str:
    return "{} x {} x {} (channels x height x width)".format(*shape)
