"""Batches for a data layer, made ahead of training in the background.

Law: `next` hands out batches 0, 1, 2, ... of `BatchMaker`, and `batches_done`, with the seed, is the whole state:
a reader that was told to `skip_to(n)` goes on exactly as one that handed out n batches.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from poseidon.data.batch import BatchMaker, BatchPlan
from poseidon.data.cursor import open_cursor
from poseidon.data.partition import Share
from poseidon.data.prefetch import Prefetcher
from poseidon.data.transform import Transform
from poseidon.errors import DataError


class BatchReader:
    """Reads one worker's share of a database, batch by batch, for ever.

    The thread starts with the first `next`, so that a reader that only tells its shape costs nothing.

    Args:
        source: the database's folder, already this client's part (see `partition.source_for`).
        backend: `Backend`, or the number of DataParameter.backend.
        batch_size: N, records in a batch, >= 1.
        transform: crop, mirror, mean, scale.
        share: which records of the database.
        seed: the job's seed, the same on all its workers: random crops and mirrors depend on it and on a
            record's place in the job, so that W workers see what one process sees.
        prefetch: batches kept ready, >= 1.
        rand_skip: start at a random record below this, the same on all workers.
        label: False when nobody wants labels; they are then an empty tensor.
        force_color: encoded pictures become three channels.

    Raises:
        DataError: the database cannot be read, or its first record does not suit the transform.
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
            raise DataError(f"a data layer on {source} has batch_size {batch_size}: expected at least 1")
        plan = BatchPlan(
            batch_size=batch_size,
            transform=transform,
            share=share,
            seed=seed,
            rand_skip=rand_skip,
            force_color=force_color,
        )
        cursor = open_cursor(source, backend)
        try:
            self._maker = BatchMaker(cursor, plan)
        except BaseException:
            cursor.close()
            raise
        self.source = source
        self._depth = max(1, prefetch)
        self._label = label
        self._batches_done = 0
        self._prefetcher: Prefetcher[tuple[Tensor, Tensor]] | None = None
        self._closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C, h, w) of every batch."""
        return self._maker.shape

    @property
    def batches_done(self) -> int:
        """Batches that `next` has handed out, those skipped included; not those made ahead."""
        return self._batches_done

    def fresh_records(self, number: int) -> int:
        """How many records of batch `number`, from its front, are read for the first time by anyone.

        Zero says that the data has ended. To be asked before the first `next`, for LevelDB counts by reading.
        """
        return self._maker.fresh_records(number)

    @property
    def ready(self) -> int:
        """Batches that `next` would hand out without waiting."""
        return self._prefetcher.ready if self._prefetcher is not None else 0

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: data (N, C, h, w) and labels (N), both float32 on the CPU.

        The tensors are the caller's as long as they live; their memory is used again afterwards.

        Raises:
            DataError: a record of the batch is damaged or has another shape, or the reader is closed.
        """
        if self._closed:
            raise DataError(f"the reader of {self.source} is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._tensors,
                first=self._batches_done,
                depth=self._depth,
                name=f"poseidon-read-{self.source.name}",
            )
        batch = self._prefetcher.get()
        self._batches_done += 1
        return batch

    def skip_to(self, batches: int) -> None:
        """Go on as if exactly `batches` >= 0 batches had been handed out."""
        self._stop()
        self._batches_done = batches

    def close(self) -> None:
        """End the background thread and let go of the database; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stop()
            self._maker.close()

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _tensors(self, number: int) -> tuple[Tensor, Tensor]:
        data, labels = self._maker.make(number)
        return torch.from_numpy(data), torch.from_numpy(labels) if self._label else torch.empty(0)
