"""The records of a dataset that a worker reads: a torch Sampler.

Law: virtual worker v of V reads indices v, v + V, v + 2 V, ... of one order that all share. The
batches of all together are the batch that one process would read. All read equally many records:
the order wraps around. Where it does not (`even=False`), all have equally many batches: the last
ones are shorter, and a virtual worker that has no record left gets one of another's, which counts
as none.

A process with several virtual workers reads their records in turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from poseidon.errors import UsageError


def number_of_records(dataset: Sized) -> int:
    """Return the length of a dataset whose records have numbers.

    Raises:
        UsageError: it has no records, or none by number.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"sampler() and loader() need records by number, but {name} is an IterableDataset; use "
            "your own DataLoader over a stream from which each worker takes its records: "
            "itertools.islice(records, group.rank, None, group.size)"
        )
    try:
        records = len(dataset)
    except TypeError as error:
        raise UsageError(
            f"sampler() and loader() need the number of records, but {name} has no len()"
        ) from error
    if records == 0:
        raise UsageError("the dataset is empty")
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order of a dataset's records in each epoch, and which of them each virtual worker has.

    Attributes:
        workers: number of virtual workers.
        seed: of the orders; the same on every worker.
        unfilled: records of a batch, if each record comes once in an epoch and the last batches
            are shorter; 0: the order wraps around.
        turn: records of a virtual worker in an iteration. All have whole turns in an epoch, and
            those of one process take turns. 0: unknown, with one virtual worker a process only.
    """

    records: int
    workers: int
    shuffle: bool = True
    seed: int = 0
    unfilled: int = 0
    turn: int = 0

    def of_epoch(self, epoch: int) -> list[int]:
        """Return the indices of all records in their order."""
        if not self.shuffle:
            return list(range(self.records))
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self.records, generator=generator, device="cpu").tolist()
        return order

    def own_records(self, virtual_worker: int, offset: int) -> int:
        """Return the number of a virtual worker's own records after the first `offset` of all."""
        if self.unfilled:
            return len(range(offset + virtual_worker, self.records, self.workers))
        count = -(-(self.records - offset) // self.workers)
        return -(-count // self.turn) * self.turn if self.turn else count

    def places(self, virtual_worker: int, offset: int) -> range:
        """Return the places in the order of all records that it reads, modulo their number."""
        count = self.own_records(virtual_worker, offset)
        if self.unfilled and -(-count // self.unfilled) < -(
            -self.own_records(0, offset) // self.unfilled
        ):
            count += 1  # the batch of a virtual worker that has no record left
        first = offset + virtual_worker
        return range(first, first + count * self.workers, self.workers)


class SharedSampler(Sampler[int]):
    """A sampler of one worker's records.

    Each iteration over it is one epoch; the next one has a different order.

    Args:
        order: of the records of the dataset.
        on_read: called with a virtual worker before each of its records that is drawn.
        on_return: called with a virtual worker before its first record when an epoch is resumed in
            its middle.

    Attributes:
        epoch: the next epoch to begin, from 0; after `load_state_dict` the epoch of the saved
            state.
        begun: loops that have begun.
    """

    def __init__(
        self,
        dataset: Sized,
        order: SampleOrder,
        *,
        own: range,
        on_read: Callable[[int], None] = lambda _: None,
        on_return: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.own = own
        self._order = order
        self._on_read = on_read
        self._on_return = on_return
        self._within = False  # an epoch has begun, and its loop has not ended
        # of that epoch: records skipped at its begin, and delivered so far
        self._first = self._position = 0
        self._offset = 0  # records of that epoch which workers of an earlier run have read
        # of a saved state: its epoch, and position and offset there
        self._return_to: tuple[int, tuple[int, int]] | None = None
        self.epoch = self.begun = 0
        try:
            self._dataset: Callable[[], object] = weakref.ref(dataset)
        except TypeError:  # a list
            self._dataset = lambda: dataset

    def continues(self, dataset: Sized, order: SampleOrder) -> bool:
        """Return whether a new sampler continues this one's epochs: it is of the same dataset, in
        the same orders, and a loop has begun.
        """
        same = replace(order, records=self._order.records)
        return self.begun > 0 and self._dataset() is dataset and self._order == same

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this worker in the next epoch; in a resumed epoch, those not
        delivered before.
        """
        self.begin()
        return self._in_turn()

    def begin(self) -> None:
        """Begin the next epoch, or resume the one of a saved state."""
        self.begun += 1
        self._within = False
        self._position, self._offset = self._place_to_return()
        self._first = self._position
        self._return_to, self._within = None, True
        self.epoch += 1

    def check_loop(self, begun: int) -> None:
        """Raise UsageError if a loop continues after a later one has begun."""
        if begun != self.begun:
            raise UsageError(
                "a loop over a sampler or loader continues after a later loop over the same "
                "records has begun; run one loop at a time, or use a loader with a different seed="
            )

    def draw(self, virtual_worker: int) -> Iterator[int]:
        """Yield a virtual worker's indices in the epoch that has begun."""
        first, order = self._first, self._order.of_epoch(self.epoch - 1)
        if first:
            self._on_return(virtual_worker)
        for place in self._order.places(virtual_worker, self._offset)[first:]:
            yield order[place % len(order)]

    def _in_turn(self) -> Iterator[int]:
        parts = {virtual_worker: self.draw(virtual_worker) for virtual_worker in self.own}
        read, begun = 0, self.begun
        while turn := [(v, i) for v in parts for i in islice(parts[v], self._order.turn or None)]:
            for virtual_worker, index in turn:
                self._on_read(virtual_worker)
                read += 1
                self._position = self._first + read // len(parts)
                yield index
                self.check_loop(begun)
        self._within = False

    def left(self, virtual_worker: int) -> int:
        """Return the number of its records in the epoch that has begun or been resumed."""
        return len(self._order.places(virtual_worker, self._offset)[self._first :])

    def records_of(self, virtual_worker: int) -> int:
        """Return the number of its records in an epoch."""
        return len(self._order.places(virtual_worker, 0))

    def __len__(self) -> int:
        return sum(map(self.records_of, self.own))

    @property
    def position(self) -> int:
        """Records of each virtual worker that were delivered of the current epoch, or of the one to
        be resumed; otherwise 0.
        """
        return self._position if self._within else self._place_to_return()[0]

    def _place_to_return(self) -> tuple[int, int]:
        epoch, place = self._return_to or (self.epoch, (0, 0))
        return place if epoch == self.epoch else (0, 0)

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
        return {"epoch": epoch, "position": position, "offset": offset, **self._of_order()}

    def _of_order(self) -> dict[str, Any]:
        """Return what determines an order, besides the epoch."""
        order = self._order
        return {"records": order.records, "shuffle": order.shuffle, "seed": order.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved state.

        Raises:
            UsageError: the state is in the middle of an epoch with a different order.
        """
        offset = state.get("offset", 0)
        within = bool(state["position"] or offset)
        for name, own in self._of_order().items():
            if within and state[name] != own:
                raise UsageError(
                    f"the checkpoint was made within an epoch of a sampler with {name} "
                    f"{state[name]}, and this one has {own}; expected the same dataset and order"
                )
        self.epoch = state["epoch"]
        self._within = False
        self._return_to = (state["epoch"], (state["position"], offset)) if within else None

    def note(self, records: int) -> None:
        """Set the number of a virtual worker's records that were delivered since this epoch was
        begun or resumed.
        """
        most = max(len(self._order.places(v, self._offset)) for v in self.own)
        self._position = min(self._first + records, most)

    def leave_out(self, records: int) -> None:
        """Leave out so many records of each virtual worker in the epoch that has begun: `draw` begins
        behind them.
        """
        self.note(self._position - self._first + records)
        self._first = self._position

    def end(self) -> None:
        """Note that the loop over this epoch has ended."""
        self._within = False

    def batch_records(self, first: int, batch_size: int) -> list[int]:
        """Return the records of each virtual worker's batch that begins with its record number
        `first`.
        """
        return [
            min(batch_size, max(0, self._order.own_records(v, self._offset) - first))
            for v in range(self._order.workers)
        ]
