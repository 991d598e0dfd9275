"""The records of a dataset that a worker reads: a torch Sampler, and a DataLoader that counts
delivered batches.

Law: worker g of W reads indices g, g + W, g + 2 W, ... of one order that all workers share. The
batches of all workers together are the batch that one process would read. All workers read equally
many records: the order wraps around. Where it does not (`even=False`), all have equally many
batches: the last ones are shorter, and a worker that has no record left gets one of another's,
which counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from poseidon.errors import UsageError

_ORDER = ("records", "shuffle", "seed")
"""What determines an order, besides the epoch."""


def _nothing(*_: object) -> None:
    pass


def _number_of_records(dataset: Sized) -> int:
    """Return the length of a dataset whose records have numbers.

    Raises:
        UsageError: it is a stream, or has no length.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"sampler() and loader() divide records by their numbers, and {name} is an "
            "IterableDataset, whose records have none; expected a DataLoader of yours, over a "
            "stream "
            "from which each worker takes its own: itertools.islice(records, group.rank, None, "
            "group.size)"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"sampler() and loader() need the number of records, and {name} has no len(); expected "
            "a dataset with len() and records by number"
        ) from error


class SharedSampler(Sampler[int]):
    """A sampler of one worker's records.

    Each iteration over it is one epoch; the next one has another order.

    Args:
        dataset: anything with a length.
        rank: this worker.
        workers: number of workers.
        shuffle: draw a new order for each epoch.
        seed: of the orders; the same on every worker.
        on_return: called before the first record when an epoch is resumed in its middle.
        unfilled: records of a batch, if each record comes once in an epoch and the last batches
            are shorter; 0: the order wraps around.

    Attributes:
        epoch: the next epoch to begin, from 0; after `load_state_dict` the epoch of the saved
            state.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int,
        workers: int,
        shuffle: bool = True,
        seed: int = 0,
        on_return: Callable[[], None] = _nothing,
        unfilled: int = 0,
    ) -> None:
        self._unfilled = unfilled
        self._records = _number_of_records(dataset)
        if self._records == 0:
            raise UsageError("the dataset is empty")
        self._rank = rank
        self._workers = workers
        self._shuffle = shuffle
        self._seed = seed
        self._on_return = on_return
        self._within = False  # an epoch has begun, and its loop has not ended
        self._first = self._position = (
            0  # of that epoch: records skipped at its begin, and delivered so far
        )
        self._counts = True  # False: its loader counts
        self._offset = 0  # records of that epoch which workers of an earlier run have read
        self._return_to: tuple[int, int, int] | None = (
            None  # epoch, position and offset of a saved state
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this worker in the next epoch; in a resumed epoch, those not
        delivered before.
        """
        self._within = False
        self._first = self._position = self.position
        self._offset = self._offset_to_return()
        self._return_to, self._within = None, True
        self.epoch += 1
        return self._draw(self.epoch - 1, self._first)

    def _draw(self, epoch: int, first: int) -> Iterator[int]:
        order = self._order(epoch)
        if first:
            self._on_return()
        for index in self._indices(self._offset)[first:]:
            if self._counts:
                self._position += 1
            yield order[index % self._records]
        if self._counts:
            self._within = False

    def __len__(self) -> int:
        """Return the number of records of this worker in an epoch."""
        return len(self._indices(0))

    @property
    def position(self) -> int:
        """Records delivered of the current epoch, or of the one to be resumed; otherwise 0."""
        if self._within:
            return self._position
        returns = self._return_to is not None and self._return_to[0] == self.epoch
        return self._return_to[1] if returns and self._return_to else 0

    def _offset_to_return(self) -> int:
        returns = self._return_to is not None and self._return_to[0] == self.epoch
        return self._return_to[2] if returns and self._return_to else 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0.

        An epoch that was saved in its middle is still resumed there.
        """
        self.epoch = epoch
        self._within = False

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its records that were delivered, and what determines
        its order.

        With a plain DataLoader this is right with `num_workers=0`: others read ahead
        (`Group.loader`).
        """
        epoch, position, offset = self.epoch, 0, 0
        if self._within:
            epoch, position, offset = self.epoch - 1, self._position, self._offset
        order = (self._records, self._shuffle, self._seed)
        of_epoch = {"epoch": epoch, "position": position, "offset": offset}
        return {**of_epoch, **dict(zip(_ORDER, order, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved state.

        Raises:
            UsageError: the state is in the middle of an epoch with another order.
        """
        offset = state.get("offset", 0)
        within = bool(state["position"] or offset)
        for name, own in zip(_ORDER, (self._records, self._shuffle, self._seed), strict=True):
            if within and state[name] != own:
                raise UsageError(
                    f"the checkpoint was made within an epoch of a sampler with {name} "
                    f"{state[name]}, and this one has {own}; "
                    "expected the same dataset and order"
                )
        self.epoch = state["epoch"]
        self._within = False
        self._return_to = (state["epoch"], state["position"], offset) if within else None

    def leave_counting(self) -> None:
        """Let the loader report deliveries with `note` and `end` from now on."""
        self._counts = False

    def note(self, records: int) -> None:
        """Set the number of records delivered since this epoch was begun or resumed."""
        self._position = min(self._first + records, len(self._indices(self._offset)))

    def end(self) -> None:
        """Note that the loop over this epoch has ended."""
        self._within = False

    def batch_records(self, first: int, batch_size: int) -> list[int]:
        """Return the records of each worker's batch that begins with its record number `first`."""
        return [
            min(batch_size, max(0, self._own_records(rank, self._offset) - first))
            for rank in range(self._workers)
        ]

    def _own_records(self, rank: int, offset: int) -> int:
        if not self._unfilled:
            return -(-(self._records - offset) // self._workers)
        return len(range(offset + rank, self._records, self._workers))

    def _indices(self, offset: int) -> range:
        count = self._own_records(self._rank, offset)
        if self._unfilled and -(-count // self._unfilled) < -(
            -self._own_records(0, offset) // self._unfilled
        ):
            count += 1  # the turn of a worker that has no record left
        first = offset + self._rank
        return range(first, first + count * self._workers, self._workers)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._records))
        generator = torch.Generator("cpu").manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._records, generator=generator, device="cpu").tolist()
        return order


class SharedLoader(DataLoader[Any]):
    """A DataLoader over a `SharedSampler`.

    It counts the batches that the loop has received, not those read ahead.

    Args:
        dataset: with records by number.
        sampler: this worker's.
        batch_size: records of a batch.
        on_batch: called with the records of each worker's batch before a batch is delivered, and
            with none at the end.
        arguments: DataLoader's others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: SharedSampler,
        batch_size: int,
        *,
        on_batch: Callable[[Sequence[int]], None] = _nothing,
        **arguments: Any,
    ) -> None:
        for name in ("sampler", "batch_sampler"):
            if name in arguments:
                raise UsageError(
                    f"loader() has a sampler of its own; expected a DataLoader of yours for {name}="
                )
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **arguments)
        sampler.leave_counting()
        self._shared = sampler
        self._records = batch_size
        self._on_batch = on_batch

    @property
    def position(self) -> int:
        """Batches delivered of the current epoch, or of the one to be resumed."""
        return -(-self._shared.position // self._records)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the next epoch."""
        for count, batch in enumerate(super().__iter__(), start=1):
            first = self._shared.position
            self._shared.note(count * self._records)
            self._on_batch(self._shared.batch_records(first, self._records))
            yield batch
        self._on_batch(())
        self._shared.end()
