"""Batches of pictures named by a list: lines of a path and a whole number, the label.

Law: a batch is a pure function of its number (and of list, share, transform and seed). A line that cannot be read is an
error with the list's name and the line.

Source: caffe's ImageDataLayer and ReadImageToCVMat: colours blue first, sizes by bilinear interpolation.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.batches.batch import MAX_DECODERS
from poseidon.data.batches.buffers import BufferPool
from poseidon.data.batches.claimed_size import check_claim
from poseidon.data.batches.draws import draw
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.order import Order
from poseidon.data.batches.partition import Share
from poseidon.data.batches.transform import Transform
from poseidon.errors import DataError

Bytes = npt.NDArray[np.uint8]
# As many digits as a Datum's label can have.
LABEL = re.compile(r"[+-]?[0-9]{1,9}")


class Line(NamedTuple):
    """One picture of a list. A tuple with a text, for a list may have millions of them."""

    number: int
    path: str
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePlan:
    """What to read and how.

    Attributes:
        batch_size: N.
        transform: crop, mirror, mean, scale.
        share: which lines.
        seed: of the job.
        size: height and width that every picture gets; None: its own.
        color: three channels, else one.
        shuffle: each pass in an order of its own.
        rand_skip: start at a random line below this; 0 starts at the first.
    """

    batch_size: int
    transform: Transform
    share: Share
    seed: int
    size: tuple[int, int] | None = None
    color: bool = True
    shuffle: bool = False
    rand_skip: int = 0


def read_list(source: Path, root: str, *, most: int | None = None) -> list[Line]:
    """Return the lines of a list file.

    Args:
        source: the file; a line is a path, a space and the label.
        root: put before each path as it is (`root_folder`).
        most: read no further than this many lines; None: all.

    Raises:
        DataError: the file cannot be read, has no lines, or a line has no label.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"cannot read the list {source}: {why}") from error
    lines: list[Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(lines) == most:
            break
        if not line.strip():
            continue
        path, _, label = line.rstrip().rpartition(" ")
        if not path or not LABEL.fullmatch(label):
            raise DataError(f"{source}:{number}: '{line[:80]}' is no path and label, such as: cats/1.jpg 0")
        lines.append(Line(number, root + path.rstrip(), int(label)))
    if not lines:
        raise DataError(f"the list {source} has no lines")
    return lines


def read_picture(path: Path, *, color: bool, size: tuple[int, int] | None = None) -> Bytes:
    """Return a picture file as (C, H, W), blue first.

    Args:
        path: the file.
        color: three channels, whatever the file has; else one.
        size: height and width to give it; None: its own.

    Raises:
        DataError: it is missing, damaged or of an unknown format. The text names the file.
    """
    if not path.is_file():
        raise DataError(f"there is no picture {path}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the picture {path} cannot be read: {error.strerror}") from error
    return planes(resized(decoded(content, path, color=color), size))


def decoded(content: bytes, path: Path, *, color: bool) -> Any:
    """Return the pixels of a picture file: (H, W, 3), blue first, or (H, W).

    Raises:
        DataError: it is damaged or of an unknown format. The text names the file.
    """
    try:
        check_claim(content)
        flag = cv2.IMREAD_COLOR if color else cv2.IMREAD_GRAYSCALE
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), flag) if content else None
    except DataError as error:
        raise DataError(f"the picture {path} cannot be decoded: {error}") from error
    except cv2.error as error:
        raise DataError(f"the picture {path} cannot be decoded: {error.err}") from error
    if pixels is None:
        raise DataError(f"the picture {path} cannot be decoded: it is damaged, or of an unknown format")
    return pixels


def resized(pixels: npt.NDArray[Any], size: tuple[int, int] | None) -> npt.NDArray[Any]:
    """Return a picture (H, W) or (H, W, C) of height and width `size`, by bilinear interpolation."""
    if size is None or pixels.shape[:2] == size:
        return pixels
    return cv2.resize(pixels, (size[1], size[0]))


def planes(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(C, H, W) of a picture (H, W) or (H, W, C)."""
    if pixels.ndim == 2:
        return pixels[np.newaxis]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class PictureMaker:
    """Makes batches of a list's pictures.

    Raises:
        DataError: the first picture cannot be read, or does not suit the transform; rand_skip passes the list's end.
    """

    def __init__(self, source: Path, lines: list[Line], plan: PicturePlan) -> None:
        self._source = source
        self._lines = lines
        self._plan = plan
        self._skipped = _skipped(source, lines, plan)
        self._order = Order([len(lines)], shuffle=plan.shuffle, seed=plan.seed)
        self._pool: ThreadPoolExecutor | None = None
        first = self._picture(self._line(0))
        self._shape = self._outcome(first, self._line(0))
        self._buffers = BufferPool((plan.batch_size, *self._shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, h, w) of the first batch; of every batch, unless pictures differ in size and nothing makes them alike."""
        return (self._plan.batch_size, *self._shape)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number` >= 0: pictures (N, C, h, w) and labels (N)."""
        plan = self._plan
        first = number * plan.batch_size
        lines = [self._line(n) for n in range(first, first + plan.batch_size)]
        draws = plan.transform.draws(plan.seed, plan.share.job_records(first, plan.batch_size))
        pictures = self._pictures(lines)
        shape = self._outcome(pictures[0], lines[0])
        data = self._buffers.take() if shape == self._shape else np.empty((len(lines), *shape), np.float32)
        for line, picture, choice, target in zip(lines, pictures, draws, data, strict=True):
            outcome = self._outcome(picture, line)
            if outcome != shape:
                raise DataError(
                    f"{self._place(line)}: picture of {_said(outcome)} in a batch whose first is {_said(shape)}; give "
                    "new_height and new_width, or a batch_size of 1"
                )
            plan.transform.one(picture, choice, target)
        labels = np.array([line.label for line in lines], np.float32)
        return torch.from_numpy(data), torch.from_numpy(labels)

    def fresh_records(self, number: int) -> int:
        """How many pictures of batch `number`, from its front, belong to the first pass through the list."""
        size = self._plan.batch_size
        return int((self._plan.share.records(number * size, size) < len(self._lines)).sum())

    def close(self) -> None:
        """End the decoding threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _line(self, n: int) -> Line:
        """This reader's n-th line."""
        return self._lines[self._order.record(self._plan.share.record(n) + self._skipped)]

    def _pictures(self, lines: list[Line]) -> list[Bytes]:
        if len(lines) == 1:
            return [self._picture(lines[0])]
        if self._pool is None:
            decoders = min(MAX_DECODERS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(decoders, thread_name_prefix="poseidon-decode")
        return list(self._pool.map(self._picture, lines))

    def _picture(self, line: Line) -> Bytes:
        try:
            return read_picture(Path(line.path), color=self._plan.color, size=self._plan.size)
        except DataError as error:
            raise DataError(f"{self._place(line)}: {error}") from error

    def _outcome(self, picture: Bytes, line: Line) -> tuple[int, int, int]:
        try:
            return self._plan.transform.output_shape(picture.shape)
        except DataError as error:
            raise DataError(f"{self._place(line)}: {error}") from error

    def _place(self, line: Line) -> str:
        return f"{self._source}:{line.number}"


class PictureReader(NumberedReader):
    """Reads one worker's share of a list of pictures, batch by batch, for ever: data (N, C, h, w) and labels (N).

    Args:
        source: the list file, already this client's part.
        root: put before each path of the list.
        plan: what to read and how.
    """

    def __init__(self, source: Path, root: str, plan: PicturePlan) -> None:
        super().__init__(source, PictureMaker(source, read_list(source, root), plan))


def _skipped(source: Path, lines: list[Line], plan: PicturePlan) -> int:
    """Lines left out at the start: drawn from the seed, so that all workers agree."""
    if not plan.rand_skip:
        return 0
    skipped = int(draw(plan.seed, np.array([-1]), 1)[0, 0]) % plan.rand_skip
    if skipped >= len(lines):
        raise DataError(f"rand_skip passes {skipped} lines, but the list {source} has only {len(lines)}")
    return skipped


def _said(shape: tuple[int, int, int]) -> str:
    return "{} x {} x {} (channels x height x width)".format(*shape)
