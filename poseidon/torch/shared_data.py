"""The records that each worker of a group reads: its DataLoader, the weights of its batches, and its
layers that normalize over all workers.

Law: each virtual worker of the process has a DataLoader of its own, so the batches, random numbers and
loader processes of one do not depend on the others. A loop gets their batches in turn: in each
iteration the batches of the first, then of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from poseidon.engine.leaf import Found, Leaf, Scope
from poseidon.engine.random_streams import seed_of
from poseidon.errors import UsageError
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.leaves import RandomStates
from poseidon.torch.sampler import SampleOrder, SharedSampler, number_of_records
from poseidon.torch.sync_norm import SyncNorms
from poseidon.torch.weights import Batch

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
        between: called between two iterations, before the first batch of each.
        arguments: DataLoader's others.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: SharedSampler,
        batch_size: int,
        loop: GroupLoop,
        between: Callable[[], None],
        **arguments: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **arguments)
        self._shared = sampler
        self._records = batch_size
        self._passes = loop.update.plan.options.passes
        self._loop = loop
        self._between = between
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
        begun = self._shared.begun
        batches = self._begin_each()
        session = self._loop.session
        first, done, left_out = self._shared.position, 0, session.left_out
        while True:
            more, left_out = session.left_out - left_out, session.left_out
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
                    self._loop.weights.note(records, virtual_worker)
                    yield batch
                    self._shared.check_loop(begun)
            if not delivered:
                break
            done += self._passes
        self._loop.weights.note((), 0)
        self._enter(None)
        self._shared.end()

    def _enter(self, virtual_worker: int | None) -> None:
        """Begin to fetch a virtual worker's batch; None: the epoch has ended."""
        streams = self._loop.streams
        streams.enter(virtual_worker)
        streams.delivered = virtual_worker

    def _begin_each(self) -> dict[int, Iterator[Any]]:
        """Return the batches of each virtual worker. A generator of the script's, which workers
        have alike, gives each numbers of its own, as the random streams do.
        """
        found: dict[int, Iterator[Any]] = {}
        number: int | None = None
        if self.generator is not None and self._loop.streams.divided:
            place = torch.empty((), dtype=torch.int64, device=self.generator.device)
            number = int(place.random_(generator=self.generator))
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
                f"each virtual worker has {count} batches in this epoch, which "
                f"passes={self._passes} does not divide, and one worker computes for several "
                "virtual workers; choose a different batch_size, or start as many workers as "
                "virtual workers"
            )


SEVERAL = "and a worker of this job computes for several virtual workers, one after the other"


class SharedData:
    """The data of one group.

    Args:
        between: called between two iterations of a loader's loop.
    """

    def __init__(self, loop: GroupLoop, between: Callable[[], None]) -> None:
        self._loop = loop
        self._between = between
        self._samplers: list[SharedSampler] = []
        self._unclaimed: list[Mapping[str, Any]] = []
        """States of samplers that the script has not created yet."""
        self._random = RandomStates(loop)
        self._norms = SyncNorms(
            loop.exchanged.module,
            lambda part: self._gather("SyncBatchNorm", part),
            lambda: loop.weights.counts,
        )
        loop.tree.add([self._leaf(), *self._random.leaves()])

    def close(self) -> None:
        self._norms.close()

    def _gather(self, call: str, payload: bytes) -> Sequence[bytes]:
        with self._loop.collections.calling(call):
            return self._loop.collections.gather(payload)

    def sampler(
        self, dataset: Sized, shuffle: bool, seed: int, *, batch_size: int
    ) -> SharedSampler:
        """See `Group.sampler`."""
        if self._loop.context.member.takes_turns and not batch_size:
            raise UsageError(
                f"sampler() has no batch_size, {SEVERAL}, each with its own batches; call "
                "sampler(dataset, batch_size=...) with the batch size of the DataLoader, or use "
                "loader()"
            )
        return self._sampler(
            dataset, shuffle, seed, turn=batch_size * self._loop.update.plan.options.passes
        )

    def _sampler(
        self, dataset: Sized, shuffle: bool, seed: int, *, unfilled: int = 0, turn: int = 0
    ) -> SharedSampler:
        """Return a new sampler, or the earlier one whose epochs continue in it."""
        tree = self._loop.tree
        order = SampleOrder(
            records=number_of_records(dataset),
            workers=tree.count,
            shuffle=shuffle,
            seed=seed,
            unfilled=unfilled,
            turn=turn,
        )
        for sampler in self._samplers:
            if sampler.continues(dataset, order):
                return sampler
        sampler = SharedSampler(
            dataset,
            order,
            own=tree.own,
            on_read=self._loop.streams.begin_reading,
            on_return=self._random.put_again,
        )
        self._samplers.append(sampler)
        if self._unclaimed:
            sampler.load_state_dict(self._unclaimed.pop(0))
        return sampler

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        even: bool,
        **arguments: Any,
    ) -> SharedLoader:
        """See `Group.loader`."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(
                f"loader() was given batch_size={batch_size}; expected a whole number, 1 or more"
            )
        for name in ("sampler", "batch_sampler"):
            if name in arguments:
                raise UsageError(
                    f"loader() makes its own sampler; for {name}= use your own DataLoader"
                )
        if not even and arguments.get("drop_last"):
            raise UsageError(
                "loader() was given even=False and drop_last=True, which contradict each other; "
                "give one of them"
            )
        records: Any = dataset  # a Dataset need not say that it has a length
        sampler = self._sampler(records, shuffle, seed, unfilled=0 if even else batch_size)
        return SharedLoader(
            dataset,
            sampler,
            batch_size,
            self._loop,
            self._between,
            **arguments,
        )

    def weigh(self, loss: Tensor, records: float | None, of: float | None) -> Tensor:
        """See `Group.weigh`."""
        loop = self._loop
        if loop.context.member.options.staleness or loop.exchanged.local_steps:
            raise UsageError("weigh() needs --staleness=0 and no local steps")
        if records is not None and loop.context.member.takes_turns:
            raise UsageError(
                f"weigh() was given the records of a batch, {SEVERAL}, so that not all have read "
                "theirs yet; call weigh(loss), with batches of group.loader()"
            )
        with loop.collecting("weigh") as gather:
            return loop.weights.weigh(loss, records, of, gather)

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """See `Group.epoch`."""
        loop = self._loop
        loop.check_open("epoch")
        if loop.context.member.takes_turns:
            raise UsageError(
                f"epoch() waits for the other workers before each batch, {SEVERAL}; use "
                "group.loader(), which gives each the same number of batches"
            )
        rank = loop.context.rank
        return loop.weights.until_all_end(batches, lambda part: self._gather("epoch", part), rank)

    def _leaf(self) -> Leaf:
        """Return the positions of the samplers, in the order of their creation."""
        return Leaf(
            name="samplers",
            scope=Scope.VIRTUAL,
            read=lambda: [
                [sampler.state_dict() for sampler in self._samplers] for _ in self._loop.tree.own
            ],
            write=self._load,
            resize=_read_together,
        )

    def _load(self, found: Found) -> None:
        self._unclaimed = list(found.mine[0])
        for sampler in self._samplers:
            if self._unclaimed:
                sampler.load_state_dict(self._unclaimed.pop(0))


def _read_together(found: Found) -> list[dict[str, Any]]:
    """Return positions after the records that all virtual workers have read together.

    Virtual worker v of V reads records v, v + V, ... of an order that all share, and all have read
    equally many. So together they have read the first records of the order, and any number of
    virtual workers can read the others.
    """
    workers = len(found.each)
    return [
        {
            **sampler,
            "position": 0,
            "offset": min(
                sampler.get("offset", 0) + sampler["position"] * workers, sampler["records"]
            ),
        }
        for sampler in found.each[0]
    ]
