"""A DataLoader of a worker's records, which counts delivered batches.

Law: each virtual worker of the process has a DataLoader of its own, so that batches, random numbers
and loader processes of one do not depend on the others. A loop gets their batches in turn: in each
iteration the batches of the first, then of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from poseidon.engine.random_streams import RandomStreams, seed_of
from poseidon.errors import UsageError
from poseidon.torch.sampler import SharedSampler
from poseidon.torch.weights import BatchWeights

_END = object()


class _OwnRecords(Sampler[int]):
    """The records of one virtual worker, for a DataLoader of its own."""

    def __init__(self, shared: SharedSampler, virtual_worker: int) -> None:
        self._shared = shared
        self._virtual_worker = virtual_worker

    def __iter__(self) -> Iterator[int]:
        return self._shared.draw(self._virtual_worker)

    def __len__(self) -> int:
        return self._shared.records_of(self._virtual_worker)


class SharedLoader(DataLoader[Any]):
    """A DataLoader over a `SharedSampler`. Each virtual worker has a DataLoader of its own in it.

    It counts the batches that the loop has received, not those read ahead.

    Args:
        dataset: with records by number.
        passes: batches of a virtual worker in an iteration.
        weights: of the batches that are delivered.
        streams: returns the random streams of the virtual workers.
        between: called between two iterations, before the first batch of each.
        left_out: returns the iterations that the job has made without this worker so far.
        arguments: DataLoader's others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: SharedSampler,
        batch_size: int,
        *,
        passes: int,
        weights: BatchWeights,
        streams: Callable[[], RandomStreams],
        between: Callable[[], None],
        left_out: Callable[[], int],
        **arguments: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if name in arguments:
                raise UsageError(
                    f"loader() makes its own sampler; for {name}= use your own DataLoader"
                )
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **arguments)
        self._shared = sampler
        self._records = batch_size
        self._passes = passes
        self._weights = weights
        self._streams = streams
        self._between = between
        self._left_out = left_out
        self._of = {
            v: DataLoader(
                dataset,
                batch_size=batch_size,
                sampler=_OwnRecords(sampler, v),
                **arguments,
            )
            for v in sampler.own
        }

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def position(self) -> int:
        """Batches delivered of the current epoch, or of the one to be resumed; between two
        iterations.
        """
        return len(self._of) * -(-self._shared.position // self._records)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the next epoch: in each iteration the batches of the first virtual
        worker, then of the next. The batches of iterations that a worker leaves out are left out.

        Raises:
            UsageError: several virtual workers' batches are not a whole number of iterations.
        """
        self._shared.begin()
        self._check_passes()
        batches = self._begin_each()
        first, done, left_out = self._shared.position, 0, self._left_out()
        while True:
            more, left_out = self._left_out() - left_out, self._left_out()
            if more:
                self._shared.leave_out(more * self._passes * self._records)
                batches, first, done = self._begin_each(), self._shared.position, 0
            self._between()
            delivered = False
            for virtual_worker, own in batches.items():
                for place in range(done, done + self._passes):
                    self._enter(virtual_worker)
                    batch = next(own, _END)
                    if batch is _END:
                        break
                    delivered = True
                    self._shared.note((place + 1) * self._records)
                    records = self._shared.batch_records(
                        first + place * self._records, self._records
                    )
                    self._weights.note(records, virtual_worker)
                    yield batch
            if not delivered:
                break
            done += self._passes
        self._weights.note((), 0)
        self._enter(None)
        self._shared.end()

    def _enter(self, virtual_worker: int | None) -> None:
        """Begin to fetch a virtual worker's batch; None: the epoch has ended."""
        streams = self._streams()
        streams.enter(virtual_worker)
        streams.delivered = virtual_worker

    def _begin_each(self) -> dict[int, Iterator[Any]]:
        """Return the batches of each virtual worker. A generator of the script's, which workers
        have alike, gives each numbers of its own, as the random streams do.
        """
        found: dict[int, Iterator[Any]] = {}
        number: int | None = None
        if self.generator is not None and self._streams().divided:
            number = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        for virtual_worker, loader in self._of.items():
            if number is not None:
                seed = seed_of(virtual_worker, number)
                loader.generator = torch.Generator().manual_seed(seed)
            self._enter(virtual_worker)
            found[virtual_worker] = iter(loader)
        return found

    def _check_passes(self) -> None:
        records = self._shared.left(self._shared.own[0])
        count = records // self._records if self.drop_last else -(-records // self._records)
        if len(self._of) > 1 and count % self._passes:
            raise UsageError(
                f"each virtual worker has {count} batches in this epoch, and passes={self._passes}:"
                " the last ones are not a whole step, and one worker computes for several virtual "
                f"workers; expected a multiple of {self._passes} batches, by another batch_size, "
                "or one virtual worker a worker"
            )
