"""The records that each worker of a group reads, the weights of its batches, and its layers that
normalize over all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from poseidon.engine.state_tree import Found, Leaf, Scope
from poseidon.errors import UsageError
from poseidon.torch.group_loop import GroupLoop
from poseidon.torch.leaves import RandomStates
from poseidon.torch.loader import SharedLoader
from poseidon.torch.sampler import SharedSampler
from poseidon.torch.sync_norm import SyncNorms
from poseidon.torch.weights import Batch

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
            loop.module,
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
            dataset, shuffle, seed, turn=batch_size * self._loop.plan.options.passes
        )

    def _sampler(
        self, dataset: Sized, shuffle: bool, seed: int, *, unfilled: int = 0, turn: int = 0
    ) -> SharedSampler:
        tree = self._loop.tree
        sampler = SharedSampler(
            dataset,
            own=tree.own,
            workers=tree.count,
            shuffle=shuffle,
            seed=seed,
            on_read=self._loop.streams.begin_reading,
            on_return=self._random.put_again,
            unfilled=unfilled,
            turn=turn,
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
        if not even and arguments.get("drop_last"):
            raise UsageError(
                "loader() was given even=False, with which each record comes once in an epoch, and "
                "drop_last=True; expected one of them"
            )
        records: Any = dataset  # a Dataset need not say that it has a length
        sampler = self._sampler(records, shuffle, seed, unfilled=0 if even else batch_size)
        return SharedLoader(
            dataset,
            sampler,
            batch_size,
            passes=self._loop.plan.options.passes,
            weights=self._loop.weights,
            streams=lambda: self._loop.streams,
            between=self._between,
            left_out=lambda: self._loop.session.left_out,
            **arguments,
        )

    def weigh(self, loss: Tensor, records: float | None, of: float | None) -> Tensor:
        """See `Group.weigh`."""
        loop = self._loop
        loop.check_open("weigh")
        if loop.context.member.options.staleness or loop.built.local_steps:
            raise UsageError(
                "weigh() weighs gradients that are averaged in each step; expected "
                "--staleness=0 and no local steps"
            )
        if records is not None and loop.context.member.takes_turns:
            raise UsageError(
                f"weigh() was given the records of a batch, {SEVERAL}, so that not all have read "
                "theirs yet; expected weigh(loss), with batches of group.loader()"
            )
        with loop.collections.calling("weigh"):
            return loop.weights.weigh(loss, records, of, loop.collections.gather)

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """See `Group.epoch`."""
        loop = self._loop
        loop.check_open("epoch")
        if loop.context.member.takes_turns:
            raise UsageError(
                f"epoch() waits for the other workers before each batch, {SEVERAL}; expected "
                "batches of group.loader(), of which each has equally many"
            )
        rank = loop.context.worker.rank
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
