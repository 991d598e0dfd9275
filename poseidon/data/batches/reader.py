"""Batches of a database's records: read, decoded and transformed.

Law: a batch is a pure function of its number (and of database, share, transform and seed), so that
a resumed job can recompute any batch. The error for a damaged record names its key and its
database. All batches have one shape; a batch of one record that is not cropped has the record's, as
in Caffe (DataLayer::load_batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.batches.buffers import BufferPool
from poseidon.data.batches.draws import skipped_records
from poseidon.data.batches.numbered import NumberedReader
from poseidon.data.batches.partition import Share
from poseidon.data.batches.prefetch import DecoderPool
from poseidon.data.batches.transform import Transform
from poseidon.data.databases.cursor import Cursor, open_cursor
from poseidon.data.datum import Decoding, RawLayout, decode
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
Record = bytes | memoryview

# Labels of raw records are cached by their encoded bytes, up to this many different ones.
KNOWN_TAILS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches to read.

    Args:
        batch_size: N, the number of records in a batch.
        share: the records of this worker.
        seed: the seed of random crops, mirrors and the skip, the same on all workers of a job.
        rand_skip: start at a random stream record below this; 0: at the first.
        label: False if labels are not needed; they are then an empty tensor.
        force_color: decode encoded images to three channels, as DataParameter.force_encoded_color.
    """

    batch_size: int
    transform: Transform
    share: Share
    seed: int
    rand_skip: int = 0
    label: bool = True
    force_color: bool = False

    @property
    def decoding(self) -> Decoding:
        """The decoding of encoded images."""
        return Decoding.COLOR if self.force_color else self.transform.decoding

    @property
    def has_one_shape(self) -> bool:
        """True if all batches have one shape; a record with another one is then an error."""
        return self.batch_size > 1 or self.transform.has_fixed_size


class BatchMaker:
    """A `Maker` of batches from a cursor, which it owns and closes.

    Not thread-safe: only one thread at a time may call `make`.

    Raises:
        DataError: the first record is damaged or cannot be transformed.
    """

    def __init__(self, cursor: Cursor, plan: BatchPlan) -> None:
        self._cursor = cursor
        self._plan = plan
        self._skipped = skipped_records(plan.seed, plan.rand_skip)
        self._tails: dict[bytes, int | None] = {}
        self._decoders = DecoderPool()
        first = cursor.value()
        image, _ = self._decode(first, cursor.position, cursor.key())
        self._shape = image.shape
        self.shape = (plan.batch_size, *plan.transform.output_shape(image.shape))
        self._layout = RawLayout.of(first)
        self._buffers = BufferPool(self.shape)

    def make(self, number: int) -> tuple[Floats, Floats]:
        """Return batch `number` >= 0: images (N, C, h, w) and labels (N)."""
        plan = self._plan
        first = number * plan.batch_size
        numbers = (plan.share.records(first, plan.batch_size) + self._skipped).tolist()
        draws = plan.transform.draws(plan.seed, plan.share.job_records(first, plan.batch_size))
        data = self._buffers.take()
        labels = self._raw_batch(numbers, draws, data) if self._layout is not None else None
        if labels is None and not plan.has_one_shape:
            return self._single(numbers[0], draws[0])
        if labels is None:
            labels = self._any_batch(numbers, draws, data)
        return data, np.array(labels, np.float32)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch `number` >= 0 as tensors."""
        data, labels = self.make(number)
        return torch.from_numpy(data), torch.from_numpy(
            labels
        ) if self._plan.label else torch.empty(0)

    def fresh_records(self, number: int) -> int:
        return self._plan.share.fresh_records(number, self._plan.batch_size, len(self._cursor))

    def close(self) -> None:
        """Close the cursor and stop the decoding threads. No `make` may be running."""
        self._decoders.close()
        self._cursor.close()

    def _raw_batch(
        self, numbers: list[int], draws: npt.NDArray[np.int64], data: Floats
    ) -> list[int] | None:
        """Fill `data` from raw records in the first record's layout.

        Return the labels, or None if a layout differs.
        """
        layout = self._layout
        assert layout is not None
        pixels: list[Record] = []
        labels: list[int] = []
        for number in numbers:
            self._cursor.seek(number)
            record = self._cursor.value()
            label = self._label(layout, record)
            if label is None:
                return None
            labels.append(label)
            pixels.append(layout.pixels(record))
        images = np.frombuffer(b"".join(pixels), np.uint8).reshape(len(numbers), *layout.shape)
        self._plan.transform.batch(images, draws, data)
        return labels

    def _label(self, layout: RawLayout, record: Record) -> int | None:
        if not layout.matches(record):
            return None
        tail = bytes(record[layout.end :])
        if tail in self._tails:
            return self._tails[tail]
        label = layout.label(tail)
        if len(self._tails) < KNOWN_TAILS:
            self._tails[tail] = label
        return label

    def _any_batch(
        self, numbers: list[int], draws: npt.NDArray[np.int64], data: Floats
    ) -> list[int]:
        """Fill `data` from records of any kind, decoded in parallel. Return the labels."""
        found = [self._found(number) for number in numbers]
        return self._decoders.map(self._fill, found, draws, data)

    def _single(self, number: int, choice: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return a batch of one record, which may have any shape."""
        found = self._found(number)
        image, label = self._decode(*found)
        data = np.empty((1, *self._output_shape(image.shape, found)), np.float32)
        self._plan.transform.one(image, choice, data[0])
        return data, np.array([label], np.float32)

    def _found(self, number: int) -> tuple[Record, int, bytes]:
        """Return a record with its position and its key."""
        self._cursor.seek(number)
        return self._cursor.value(), self._cursor.position, self._cursor.key()

    def _fill(
        self, found: tuple[Record, int, bytes], choice: npt.NDArray[np.int64], target: Floats
    ) -> int:
        """Decode a record into `target` and return its label."""
        image, label = self._decode(*found)
        self._require_shape(image.shape, found)
        self._plan.transform.one(image, choice, target)
        return label

    def _decode(self, record: Record, position: int, key: bytes) -> tuple[npt.NDArray[Any], int]:
        try:
            return decode(record, self._plan.decoding)
        except DataError as error:
            raise DataError(f"{self._location(position, key)}: {error}") from error

    def _require_shape(self, shape: Sequence[int], found: tuple[Record, int, bytes]) -> None:
        """Raise DataError unless an image has the first one's size after the crop."""
        if shape == self._shape or self._output_shape(shape, found) == self.shape[1:]:
            return
        channels, first = shape[0], self._shape[0]
        remedy = "set crop_size or resize_param in transform_param, or batch_size: 1"
        if channels != first:
            remedy = (
                "set force_color or force_gray in transform_param, which convert encoded images"
            )
        raise DataError(
            f"{self._location(*found[1:])} is {channels} x {shape[1]} x {shape[2]} (channels x "
            "height "
            f"x width), but the first record is {first} x {self._shape[1]} x {self._shape[2]}; "
            f"{remedy}"
        )

    def _output_shape(
        self, shape: Sequence[int], found: tuple[Record, int, bytes]
    ) -> tuple[int, int, int]:
        try:
            return self._plan.transform.output_shape(shape)
        except DataError as error:
            raise DataError(f"{self._location(*found[1:])}: {error}") from error

    def _location(self, position: int, key: bytes) -> str:
        return f"{self._cursor.path}: record {position} (key '{key.decode(errors='backslashreplace')}')"


class BatchReader(NumberedReader):
    """An endless reader of one worker's share of a database: data (N, C, h, w) and labels (N).

    Args:
        source: the folder of the database or of this client's part of it (see
            `partition.source_for`).
        backend: a `Backend`, or its number in DataParameter.DB.
        batch_size: N, the number of records in a batch, >= 1.
        transform: crop, mirror, mean, scale.
        share: the records of this worker.
        seed: the seed of the job, the same on all workers. Random crops and mirrors depend on it
            and on the record's number in the job, so that W workers see what one process sees.
        prefetch: the number of batches to prepare ahead, >= 1.
        rand_skip: start at a random record below this, the same on all workers.
        label: False if labels are not needed; they are then an empty tensor.
        force_color: decode encoded images to three channels.

    Raises:
        DataError: the database cannot be read, or its first record cannot be transformed.

    Attributes:
        has_one_shape: all batches have one shape; see `BatchPlan`.
    """

    def __init__(
        self,
        *,
        source: Path,
        backend: int,
        batch_size: int,
        transform: Transform,
        share: Share,
        seed: int,
        prefetch: int = 4,
        rand_skip: int = 0,
        label: bool = True,
        force_color: bool = False,
    ) -> None:
        if batch_size < 1:
            raise DataError(
                f"a data layer on {source} has batch_size {batch_size}: expected at least 1"
            )
        plan = BatchPlan(
            batch_size=batch_size,
            transform=transform,
            share=share,
            seed=seed,
            rand_skip=rand_skip,
            label=label,
            force_color=force_color,
        )
        self.has_one_shape = plan.has_one_shape
        cursor = open_cursor(source, backend)
        try:
            maker = BatchMaker(cursor, plan)
        except BaseException:
            cursor.close()
            raise
        super().__init__(source, maker, prefetch=prefetch)
