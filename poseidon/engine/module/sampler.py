"""Which records of a dataset a worker reads: a torch Sampler, and a DataLoader that knows which of them its loop has had.

Law: worker g of W reads places g, g + W, g + 2 W, ... of one order that all workers share, so that the g-th parts of all
workers' batches are together the batch that one process would read. All read equally many: the order wraps around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from poseidon.errors import UsageError

_ORDER = ("records", "shuffle", "seed")
"""What an order follows from, beside the epoch."""


def _nothing() -> None:
    pass


class SharedSampler(Sampler[int]):
    """Each iteration over it is one epoch; the next one has another order.

    Args:
        dataset: anything with a length.
        rank: this worker.
        workers: number of workers.
        shuffle: whether the order is drawn anew for each epoch.
        seed: of the orders; the same on every worker.
        on_return: called when an epoch that a saved run was in the middle of goes on, before its first record.

    Attributes:
        epoch: the next epoch to begin, from 0; after `load_state_dict` the one that the saved run was in.
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
    ) -> None:
        self._records = len(dataset)
        if self._records == 0:
            raise UsageError("the dataset is empty")
        self._rank = rank
        self._workers = workers
        self._shuffle = shuffle
        self._seed = seed
        self._on_return = on_return
        self._within = False  # an epoch has begun, and its loop has not ended
        self._first = self._position = (
            0  # of that epoch: records left out at its begin, and handed out by now
        )
        self._counts = True  # False: its loader does
        self._return_to: tuple[int, int] | None = None  # epoch and position of a saved run
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """The places of this worker in the next epoch; of one that a saved run was in, those that it had not had."""
        self._within = False
        self._first = self._position = self.position
        self._return_to, self._within = None, True
        self.epoch += 1
        return self._draw(self.epoch - 1, self._first)

    def _draw(self, epoch: int, first: int) -> Iterator[int]:
        order = self._order(epoch)
        if first:
            self._on_return()
        for place in self._places()[first:]:
            if self._counts:
                self._position += 1
            yield order[place % self._records]
        if self._counts:
            self._within = False

    def __len__(self) -> int:
        """Records of this worker in an epoch."""
        return len(self._places())

    @property
    def position(self) -> int:
        """Records handed out of the epoch that is under way, or that goes on where a saved run was; else 0."""
        if self._within:
            return self._position
        returns = self._return_to is not None and self._return_to[0] == self.epoch
        return self._return_to[1] if returns and self._return_to else 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from 0. One that a saved run was in the middle of still goes on there."""
        self.epoch = epoch
        self._within = False

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its records this worker has handed out, and what its order follows from.

        With a plain DataLoader this is right with `num_workers=0`: others draw records ahead (`Group.loader`).
        """
        epoch, position = (self.epoch - 1, self._position) if self._within else (self.epoch, 0)
        order = (self._records, self._shuffle, self._seed)
        return {"epoch": epoch, "position": position, **dict(zip(_ORDER, order, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run was.

        Raises:
            UsageError: it was in the middle of an epoch whose order was another one.
        """
        for name, own in zip(_ORDER, (self._records, self._shuffle, self._seed), strict=True):
            if state["position"] and state[name] != own:
                raise UsageError(
                    f"the checkpoint was made within an epoch of a sampler with {name} {state[name]}, and this one has {own}; "
                    "expected the same dataset and order"
                )
        self.epoch = state["epoch"]
        self._within = False
        self._return_to = (state["epoch"], state["position"]) if state["position"] else None

    # -- for a loader --------------------------------------------------------------------------------------

    def leave_counting(self) -> None:
        """From now on `note` and `end` say what has been handed out."""
        self._counts = False

    def note(self, records: int) -> None:
        """So many records have been handed out since this epoch was begun or gone on with."""
        self._position = min(self._first + records, len(self))

    def end(self) -> None:
        """The loop over this epoch has ended."""
        self._within = False

    def _places(self) -> range:
        rounds = -(-self._records // self._workers)
        return range(self._rank, rounds * self._workers, self._workers)

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._records))
        generator = torch.Generator("cpu").manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._records, generator=generator, device="cpu").tolist()
        return order


class SharedLoader(DataLoader[Any]):
    """A DataLoader over a `SharedSampler`, which learns from it what the loop has had: batches drawn ahead do not count.

    Args:
        dataset: with records by number.
        sampler: this worker's.
        batch_size: records of a batch.
        arguments: DataLoader's others.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: SharedSampler, batch_size: int, **arguments: Any
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

    @property
    def position(self) -> int:
        """Batches that the loop has had of the epoch under way, or of the one that goes on where a saved run was."""
        return -(-self._shared.position // self._records)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the next epoch."""
        for count, batch in enumerate(super().__iter__(), start=1):
            self._shared.note(count * self._records)
            yield batch
        self._shared.end()
