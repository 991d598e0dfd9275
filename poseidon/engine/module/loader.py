"""A DataLoader of a worker's records, which counts delivered batches.

Law: each virtual worker of the process has a DataLoader of its own, so that batches, random numbers
and loader processes of one do not depend on the others. A loop gets their batches in turn: in each
iteration the batches of the first, then of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, Sampler

from poseidon.engine.module.sampler import SharedSampler
from poseidon.errors import UsageError

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


class Delivery(Protocol):
    """What a group does with the batches of its loader."""

    def between(self) -> None:
        """Do what belongs between two iterations; before the first batch of each."""

    def left_out(self) -> int:
        """Return the iterations that the job has made without this worker so far."""

    def fetching(self, virtual_worker: int) -> None:
        """Note that a virtual worker's batch is fetched next."""

    def delivering(self, records: Sequence[int], virtual_worker: int) -> None:
        """Note the records of each virtual worker's batch, before one's is delivered."""

    def ended(self) -> None:
        """Note the end of an epoch."""


class NoDelivery(Delivery):
    """A loader without a group."""

    def between(self) -> None:
        pass

    def left_out(self) -> int:
        return 0

    def fetching(self, virtual_worker: int) -> None:
        pass

    def delivering(self, records: Sequence[int], virtual_worker: int) -> None:
        pass

    def ended(self) -> None:
        pass


class SharedLoader(DataLoader[Any]):
    """A DataLoader over a `SharedSampler`. Each virtual worker has a DataLoader of its own in it.

    It counts the batches that the loop has received, not those read ahead.

    Args:
        dataset: with records by number.
        sampler: this worker's.
        batch_size: records of a batch.
        passes: batches of a virtual worker in an iteration.
        delivery: is told of batches.
        arguments: DataLoader's others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: SharedSampler,
        batch_size: int,
        *,
        passes: int = 1,
        delivery: Delivery | None = None,
        **arguments: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if name in arguments:
                raise UsageError(
                    f"loader() has a sampler of its own; expected a DataLoader of yours for {name}="
                )
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **arguments)
        self._shared = sampler
        self._records = batch_size
        self._passes = passes
        self._delivery = delivery or NoDelivery()
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
        """Return the number of batches that a loop gets in an epoch."""
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
        first, done, left_out = self._shared.position, 0, self._delivery.left_out()
        while True:
            more, left_out = self._delivery.left_out() - left_out, self._delivery.left_out()
            if more:
                self._shared.leave_out(more * self._passes * self._records)
                batches, first, done = self._begin_each(), self._shared.position, 0
            self._delivery.between()
            delivered = False
            for virtual_worker, own in batches.items():
                for place in range(done, done + self._passes):
                    self._delivery.fetching(virtual_worker)
                    batch = next(own, _END)
                    if batch is _END:
                        break
                    delivered = True
                    self._shared.note((place + 1) * self._records)
                    records = self._shared.batch_records(
                        first + place * self._records, self._records
                    )
                    self._delivery.delivering(records, virtual_worker)
                    yield batch
            if not delivered:
                break
            done += self._passes
        self._delivery.ended()
        self._shared.end()

    def _begin_each(self) -> dict[int, Iterator[Any]]:
        """Return the batches of each virtual worker. A generator of the script's gives each the
        numbers that it would give to the only one of a worker.
        """
        found: dict[int, Iterator[Any]] = {}
        state = None if self.generator is None else self.generator.get_state()
        for virtual_worker, loader in self._of.items():
            if self.generator is not None and state is not None:
                self.generator.set_state(state)
            self._delivery.fetching(virtual_worker)
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
