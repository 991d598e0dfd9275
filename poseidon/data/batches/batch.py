"""From records to one batch: read, decode, transform.

Law: a batch is a pure function of its number (and of database, share, transform and seed), so that any batch can
be made again after a resume. A damaged record is an error that names its key and its database.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.data.batches.buffers import BufferPool
from poseidon.data.batches.draws import draw
from poseidon.data.batches.partition import Share
from poseidon.data.batches.transform import Transform
from poseidon.data.databases.cursor import Cursor
from poseidon.data.datum import Decoding, RawLayout, decode
from poseidon.errors import DataError

Floats = npt.NDArray[np.float32]
Record = bytes | memoryview

# Labels of raw records are looked up by the bytes that spell them; more different ones than this are parsed.
KNOWN_TAILS = 100_000
# Pictures decode in parallel; beyond this, several workers of one machine would fight over its cores.
MAX_DECODERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What to read and how.

    Args:
        batch_size: N, records in a batch.
        share: which records.
        seed: of random crops, mirrors and the skip; the same on all workers of a job.
        rand_skip: start at a random stream record below this; 0 starts at the first.
        label: False when nobody wants labels; they are then an empty tensor.
        force_color: encoded pictures become three channels, as by DataParameter.force_encoded_color.
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
        """How encoded pictures are decoded."""
        return Decoding.COLOR if self.force_color else self.transform.decoding

    @property
    def skipped(self) -> int:
        """Stream records left out at the start: drawn from the seed, so that all workers agree."""
        if not self.rand_skip:
            return 0
        return int(draw(self.seed, np.array([-1]), 1)[0, 0]) % self.rand_skip


class BatchMaker:
    """Makes batches from a cursor, which it owns and closes.

    Not thread-safe: one thread at a time calls `make`.

    Raises:
        DataError: the first record is damaged, or does not suit the transform.
    """

    def __init__(self, cursor: Cursor, plan: BatchPlan) -> None:
        self._cursor = cursor
        self._plan = plan
        self._skipped = plan.skipped
        self._tails: dict[bytes, int | None] = {}
        self._pool: ThreadPoolExecutor | None = None
        first = cursor.value()
        image, _ = self._decode(first, cursor.position, cursor.key())
        self._shape = image.shape
        self.shape = (plan.batch_size, *plan.transform.output_shape(image.shape))
        self._layout = RawLayout.of(first)
        self._buffers = BufferPool(self.shape)

    def make(self, number: int) -> tuple[Floats, Floats]:
        """Batch `number` >= 0: pictures (N, C, h, w) and labels (N)."""
        plan = self._plan
        first = number * plan.batch_size
        places = (plan.share.records(first, plan.batch_size) + self._skipped).tolist()
        draws = plan.transform.draws(plan.seed, plan.share.job_records(first, plan.batch_size))
        data = self._buffers.take()
        labels = self._raw_batch(places, draws, data) if self._layout is not None else None
        if labels is None:
            labels = self._any_batch(places, draws, data)
        return data, np.array(labels, np.float32)

    def tensors(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number` >= 0 as tensors."""
        data, labels = self.make(number)
        return torch.from_numpy(data), torch.from_numpy(labels) if self._plan.label else torch.empty(0)

    def fresh_records(self, number: int) -> int:
        """How many records of batch `number`, from its front, belong to the first pass through the database."""
        plan = self._plan
        records = plan.share.records(number * plan.batch_size, plan.batch_size)
        return int((records < len(self._cursor)).sum())

    def close(self) -> None:
        """Close the cursor and end the decoding threads; no `make` may be under way."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._cursor.close()

    def _raw_batch(self, places: list[int], draws: npt.NDArray[np.int64], data: Floats) -> list[int] | None:
        """Labels of a batch of raw records of the first record's layout, or None when one differs."""
        layout = self._layout
        assert layout is not None
        pixels: list[Record] = []
        labels: list[int] = []
        for place in places:
            self._cursor.seek(place)
            record = self._cursor.value()
            label = self._label(layout, record)
            if label is None:
                return None
            labels.append(label)
            pixels.append(layout.pixels(record))
        images = np.frombuffer(b"".join(pixels), np.uint8).reshape(len(places), *layout.shape)
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

    def _any_batch(self, places: list[int], draws: npt.NDArray[np.int64], data: Floats) -> list[int]:
        """Labels of a batch of records of any kind, decoded side by side."""
        found: list[tuple[Record, int, bytes]] = []
        for place in places:
            self._cursor.seek(place)
            found.append((self._cursor.value(), self._cursor.position, self._cursor.key()))
        if self._pool is None:
            decoders = min(MAX_DECODERS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(decoders, thread_name_prefix="poseidon-decode")
        return list(self._pool.map(self._fill, found, draws, data))

    def _fill(self, found: tuple[Record, int, bytes], choice: npt.NDArray[np.int64], target: Floats) -> int:
        """Decode one record into its place of the batch; its label."""
        image, label = self._decode(*found)
        self._require_shape(image.shape, found)
        self._plan.transform.one(image, choice, target)
        return label

    def _decode(self, record: Record, position: int, key: bytes) -> tuple[npt.NDArray[Any], int]:
        try:
            return decode(record, self._plan.decoding)
        except DataError as error:
            raise DataError(f"{self._place(position, key)}: {error}") from error

    def _require_shape(self, shape: Sequence[int], found: tuple[Record, int, bytes]) -> None:
        """Pictures of other sizes will do only where a crop makes them equal."""
        if shape == self._shape:
            return
        place = self._place(*found[1:])
        try:
            outcome = self._plan.transform.output_shape(shape)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if outcome != self.shape[1:]:
            raise DataError(
                f"{place} is {shape[0]} x {shape[1]} x {shape[2]} (channels x height x width), but the first record "
                f"is {self._shape[0]} x {self._shape[1]} x {self._shape[2]}: records of a net's data must be alike"
            )

    def _place(self, position: int, key: bytes) -> str:
        return f"{self._cursor.path}: record {position} (key '{key.decode(errors='backslashreplace')}')"
