"""Readers that prepare numbered batches in the background, from any source.

Law: `next` returns batches 0, 1, 2, ... of a `Maker`. `batches_done` and the seed are the whole
state: after `skip_to(n)` a reader continues exactly like one that has returned n batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from poseidon.caffe.data.batches.partition import Share
from poseidon.caffe.data.batches.prefetch import Prefetcher
from poseidon.caffe.data.batches.transform import Transform
from poseidon.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches of images to read.

    Attributes:
        batch_size: N.
        transform: crop, mirror, mean, scale.
        share: the records of this worker.
        seed: the seed of all random choices, the same on all workers of a job.
        rand_skip: start at a random record below this; 0: at the first.
    """

    batch_size: int
    transform: Transform
    share: Share
    seed: int
    rand_skip: int = 0


class Maker(ABC):
    """A source that makes any batch from its number. Only one thread at a time may call it.

    Args:
        share: the records of this worker.
        batch_size: the number of records in a batch.

    Attributes:
        shape: the shape of the first tensor of every batch, or of the first batch if shapes differ.
    """

    shape: tuple[int, ...]

    def __init__(self, share: Share, batch_size: int) -> None:
        self._share, self._batch_size = share, batch_size

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records of the source."""

    @abstractmethod
    def tensors(self, number: int) -> tuple[Tensor, ...]:
        """Return batch `number` >= 0, on the CPU.

        Raises:
            DataError: a record of the batch is damaged, or its shape differs from the others.
        """

    def fresh_records(self, number: int) -> int:
        """Return how many leading records of batch `number` belong to the first epoch of the
        source.
        """
        return self._share.fresh_records(number, self._batch_size, len(self))

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the files. No other call may be running. The default does nothing."""


Self = TypeVar("Self", bound="NumberedReader[Maker]")
M = TypeVar("M", bound=Maker, covariant=True)


class NumberedReader(Generic[M]):
    """An endless reader of one worker's batches.

    The thread starts with the first `next`, so a reader that is only asked for its shape costs
    nothing.

    Args:
        source: the source of the records, for error messages.
        maker: the maker of the batches, closed with the reader.
        prefetch: the number of batches to prepare ahead, >= 1.
    """

    def __init__(self, source: Path, maker: M, *, prefetch: int = 4) -> None:
        self.source = source
        self.maker = maker
        self._prefetch = prefetch
        self._depth = max(1, prefetch)
        self._batches_done = 0
        self._prefetcher: Prefetcher[tuple[Tensor, ...]] | None = None
        self._closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first tensor of every batch, or of the first batch if shapes differ."""
        return self.maker.shape

    @property
    def batches_done(self) -> int:
        """The number of batches that `next` has returned or `skip_to` has skipped; not those
        prepared ahead.
        """
        return self._batches_done

    def fresh_records(self, number: int) -> int:
        """Return how many leading records of batch `number` belong to the first epoch of the
        source.

        Zero means that the epoch has ended. Call it before the first `next`, because LevelDB counts
        records by reading.
        """
        return self.maker.fresh_records(number)

    @property
    def ready(self) -> int:
        """The number of batches that `next` would return without waiting."""
        return self._prefetcher.ready if self._prefetcher is not None else 0

    def divide_prefetch(self, readers: int) -> None:
        """Prepare fewer batches ahead, at least one, because as many readers take turns.

        If their number changes, those that are prepared are made again.
        """
        depth = max(1, self._prefetch // readers)
        if depth != self._depth:
            self._stop()
            self._depth = depth

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch: float32 tensors on the CPU.

        The caller owns the tensors. Their memory is reused after they are freed.

        Raises:
            DataError: a record of the batch is damaged or has a different shape, or the reader is
                closed.
        """
        if self._closed:
            raise DataError(f"the reader of {self.source} is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self.maker.tensors,
                first=self._batches_done,
                depth=self._depth,
                name=f"poseidon-read-{self.source.name}",
            )
        batch = self._prefetcher.get()
        self._batches_done += 1
        return batch

    def skip_to(self, batches: int) -> None:
        """Continue as if exactly `batches` >= 0 batches had been returned."""
        self._stop()
        self._batches_done = batches

    def close(self) -> None:
        """Stop the background thread and close the source. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stop()
            self.maker.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
