"""Batches of images with a label for each pixel, from a list whose lines are the paths of an image and of its label image.

Law: that of `poseidon.data.batches.images`. A label image has one channel, whose values are the labels. It is resized by the
nearest neighbour, and cropped and mirrored like its image.

Source: SegNet's DenseImageDataLayer, which refuses crop_size and mirror.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from poseidon.data.batches.draws import skipped_records
from poseidon.data.batches.images import Bytes, ImagePlan, read_image
from poseidon.data.batches.lists import Order, read_lines
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.prefetch import DecoderPool
from poseidon.errors import DataError


class Pair(NamedTuple):
    """A line of a list: the paths of an image and of its label image."""

    number: int
    image: str
    label: str


def read_pairs(source: Path, root: str, *, most: int | None = None) -> list[Pair]:
    """Read the lines of a list file.

    Args:
        source: the file; a line is two paths, which have no spaces.
        root: the prefix of each path (`root_folder`).
        most: the maximum number of lines to read; None: all.

    Raises:
        DataError: the file cannot be read, is empty, or has a line of another form.
    """
    pairs: list[Pair] = []
    for number, line in enumerate(read_lines(source, "list"), 1):
        if len(pairs) == most:
            break
        words = line.split()
        if not words:
            continue
        if len(words) != 2:
            raise DataError(
                f"{source}:{number}: '{line[:80].strip()}' is not the path of an image and of its label image, such as: 1.png 1_label.png"
            )
        pairs.append(Pair(number, root + words[0], root + words[1]))
    if not pairs:
        raise DataError(f"the list {source} is empty")
    return pairs


def read_labels(path: Path, size: tuple[int, int] | None) -> Bytes:
    """Read a label image as (1, H, W).

    Raises:
        DataError: the file is missing, damaged or of an unknown format. The text names it.
    """
    labels = read_image(path, color=False)
    if size is not None and labels.shape[1:] != size:
        labels = cv2.resize(labels[0], (size[1], size[0]), interpolation=cv2.INTER_NEAREST)[np.newaxis]
    return labels


class DenseImageMaker:
    """A maker of batches of a list's images and label images.

    Raises:
        DataError: the first image or its label image cannot be read or transformed, or rand_skip exceeds the list.
    """

    def __init__(self, source: Path, pairs: list[Pair], plan: ImagePlan) -> None:
        self._source, self._pairs, self._plan = source, pairs, plan
        self._skipped = skipped_records(plan.seed, plan.rand_skip)
        if self._skipped >= len(pairs):
            raise DataError(
                f"rand_skip skips {self._skipped} lines, but the list {source} has only {len(pairs)}"
            )
        self._order = Order([len(pairs)], shuffle=plan.shuffle, seed=plan.seed)
        self._decoders = DecoderPool()
        first = self._pair(0)
        self._shape = self._output_shape(self._read(first)[0], first)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (N, C, h, w) of the first batch; of every batch unless images differ in size."""
        return (self._plan.batch_size, *self._shape)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch `number` >= 0: images (N, C, h, w) and labels (N, 1, h, w)."""
        plan = self._plan
        first = number * plan.batch_size
        pairs = [self._pair(n) for n in range(first, first + plan.batch_size)]
        draws = plan.transform.draws(plan.seed, plan.share.job_records(first, plan.batch_size))
        read = [self._read(pairs[0])] if len(pairs) == 1 else self._decoders.map(self._read, pairs)
        shape = self._output_shape(read[0][0], pairs[0])
        data = np.empty((len(pairs), *shape), np.float32)
        labels = np.empty((len(pairs), 1, *shape[1:]), np.float32)
        for index, (pair, (image, label), choice) in enumerate(zip(pairs, read, draws, strict=True)):
            if self._output_shape(image, pair) != shape:
                raise DataError(
                    f"{self._location(pair)}: an image of another size in a batch; set new_height and new_width, or batch_size: 1"
                )
            plan.transform.one(image, choice, data[index])
            labels[index] = plan.transform.placed(label, choice)
        return torch.from_numpy(data), torch.from_numpy(labels)

    def fresh_records(self, number: int) -> int:
        """See `Maker`."""
        return self._plan.share.fresh_records(number, self._plan.batch_size, len(self._pairs))

    def close(self) -> None:
        """Stop the decoding threads."""
        self._decoders.close()

    def _pair(self, n: int) -> Pair:
        return self._pairs[self._order.record(self._plan.share.record(n) + self._skipped)]

    def _read(self, pair: Pair) -> tuple[Bytes, Bytes]:
        try:
            image = read_image(Path(pair.image), color=self._plan.color, size=self._plan.size)
            labels = read_labels(Path(pair.label), self._plan.size)
        except DataError as error:
            raise DataError(f"{self._location(pair)}: {error}") from error
        if labels.shape[1:] != image.shape[1:]:
            raise DataError(
                f"{self._location(pair)}: the image is {image.shape[1]}x{image.shape[2]} and its label image "
                f"{labels.shape[1]}x{labels.shape[2]}, expected one size"
            )
        return image, labels

    def _output_shape(self, image: Bytes, pair: Pair) -> tuple[int, int, int]:
        try:
            return self._plan.transform.output_shape(image.shape)
        except DataError as error:
            raise DataError(f"{self._location(pair)}: {error}") from error

    def _location(self, pair: Pair) -> str:
        return f"{self._source}:{pair.number}"


class DenseImageReader(NumberedReader):
    """An endless reader of one worker's share of a list: images (N, C, h, w) and labels (N, 1, h, w).

    Args:
        source: the list file, already this client's part.
        root: the prefix of each path of the list.
        plan: the batches to read.
    """

    def __init__(self, source: Path, root: str, plan: ImagePlan) -> None:
        super().__init__(source, DenseImageMaker(source, read_pairs(source, root), plan))
