"""Batches made ahead of training in the background, whatever they are made of.

Law: `next` hands out batches 0, 1, 2, ... of a `Maker`, and `batches_done`, with the seed, is the whole state: a reader that was
told to `skip_to(n)` goes on exactly as one that handed out n batches.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from torch import Tensor

from poseidon.data.batches.prefetch import Prefetcher
from poseidon.errors import DataError

Self = TypeVar("Self", bound="NumberedReader")


class Maker(Protocol):
    """Makes any batch from its number. One thread at a time calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor of every batch; of the first batch where they differ."""

    def tensors(self, number: int) -> tuple[Tensor, ...]:
        """Batch `number` >= 0, on the CPU.

        Raises:
            DataError: a record of the batch is damaged, or unlike the others.
        """

    def fresh_records(self, number: int) -> int:
        """How many records of batch `number`, from its front, belong to the first pass through the source."""

    def close(self) -> None:
        """Let go of files; no other call may be under way."""


class NumberedReader:
    """One worker's batches, for ever.

    The thread starts with the first `next`, so that a reader that only tells its shape costs nothing.

    Args:
        source: where the records come from, for messages.
        maker: makes the batches; closed with the reader.
        prefetch: batches kept ready, >= 1.
    """

    def __init__(self, source: Path, maker: Maker, *, prefetch: int = 4) -> None:
        self.source = source
        self._maker = maker
        self._depth = max(1, prefetch)
        self._batches_done = 0
        self._prefetcher: Prefetcher[tuple[Tensor, ...]] | None = None
        self._closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor of every batch; of the first batch where they differ."""
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

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch: float32 tensors on the CPU.

        The tensors are the caller's as long as they live; their memory is used again afterwards.

        Raises:
            DataError: a record of the batch is damaged or has another shape, or the reader is closed.
        """
        if self._closed:
            raise DataError(f"the reader of {self.source} is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._maker.tensors,
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
        """End the background thread and let go of the source; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stop()
            self._maker.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
