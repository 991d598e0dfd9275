"""What a worker keeps in local steps, and what a snapshot holds of it.

`InnerWorkers` has the values and inner histories of each virtual worker of the process within a round.

Law: the module has the values of the virtual worker whose turn it is; between two iterations, the first
one's. So passes, hooks and updates work on the module's tensors, whoever's turn it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.broadcast import bring_parts
from poseidon.exchange.carrier import CarrierState, KeptHistories, Step, UnitedState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.ruled import LocalHistories
from ps_server import RuleKind
from ps_server.collection import Coming
from ps_server.rules import clip_factor


class InnerWorkers:
    """The virtual workers of a process, each with a rule, histories and values of its own.

    One virtual worker has its values in the module alone. Several have a copy each besides.

    Args:
        settings: common to all tensors; the limit is for the gradients of each virtual worker.

    Attributes:
        by_caller: whether an optimizer of the caller changes the values, which keeps its own state.
    """

    def __init__(
        self, tensors: Sequence[Trained], settings: ExchangeSettings, *, count: int
    ) -> None:
        self.count = count
        self.by_caller = any(trained.rule.kind is RuleKind.MEAN for trained in tensors)
        self._values = [trained.tensor.detach() for trained in tensors]
        ruled = () if self.by_caller else tensors
        self._carriers = [AloneCarrier(ruled, settings) for _ in range(count)]
        self.histories: list[LocalHistories] = [carrier.state for carrier in self._carriers]
        self._clip = settings.clip
        self._copies = (
            [[torch.empty_like(value) for value in self._values] for _ in range(count)]
            if count > 1
            else []
        )
        self._turn = 0

    def values(self, index: int) -> list[Tensor]:
        """Return the values of a tensor, of each virtual worker. Between two iterations, or in the
        first turn of one.
        """
        assert self._turn == 0
        return [self._values[index], *(copies[index] for copies in self._copies[1:])]

    def open(self, histories: Sequence[Sequence[History] | None], clock: int | None) -> None:
        """Continue from histories of each virtual worker; see `Exchange.open`."""
        for carrier, own in zip(self._carriers, histories, strict=True):
            carrier.open(own, clock)

    def start(self, step: Step) -> None:
        """Begin an iteration."""
        for carrier in self._carriers:
            carrier.start(step)

    def begin(self, index: int, gradient: Tensor) -> None:
        """Take the gradient of a tensor, of the virtual worker whose turn it is."""
        if not self.by_caller:
            self._carriers[self._turn].begin(index, gradient)

    def next(self) -> None:
        """Update the values of this turn, and begin the next one."""
        self._update()
        self._enter(self._turn + 1)

    def finish(self) -> None:
        """Update the values of the last turn, and end the iteration."""
        self._update()
        self._enter(0)

    def _update(self) -> None:
        carrier, limit = self._carriers[self._turn], 1.0
        if self._clip is not None and not self.by_caller:
            limit = clip_factor(math.fsum(carrier.held_squares()), self._clip)
        carrier.finish(limit)

    def set(self, values: list[Tensor]) -> None:
        """Set the values of all virtual workers. Between two iterations."""
        for own in (self._values, *self._copies[1:]):
            torch._foreach_copy_(own, values)

    def _enter(self, turn: int) -> None:
        if turn != self._turn:
            torch._foreach_copy_(self._copies[self._turn], self._values)
            torch._foreach_copy_(self._values, self._copies[turn])
            self._turn = turn


class RoundsState(UnitedState):
    """Each worker has inner histories of its own; the outer history is the outer exchange's.

    Args:
        inner: the histories of the rules of each virtual worker of this process; none where an
            optimizer of the caller keeps them.
        anchors: the tensors of the outer exchange.
        member: of the job.
        outer_arrays: the most arrays of a tensor's outer history.
        outer_histories: returns the outer histories; None where this worker does not read them:
            rank 0 does.
        barrier: waits for all workers, where others may otherwise continue before this worker has
            the outer histories (`rounds/quorum.py`); None: they may not.
    """

    def __init__(
        self,
        inner: Sequence[LocalHistories],
        outer: CarrierState,
        anchors: Sequence[Trained],
        member: Membership,
        *,
        outer_histories: Callable[[], Mapping[int, History]] | None,
        outer_arrays: int = 1,
        barrier: Callable[[], object] | None = None,
    ) -> None:
        super().__init__([outer])
        self.private, self.overtaken = True, barrier is not None
        self._barrier = barrier
        self._inner = inner
        self._anchors = anchors
        self._rank, self._own = member.network.rank, member.own
        self._given: Mapping[str, Array] = {}
        first = inner[0].of
        self._counts = [len(first[i].history) if i in first else 0 for i in range(len(anchors))]
        """For each tensor the number of its inner history arrays."""
        self._outer_arrays = outer_arrays
        self._outer_histories = outer_histories

    def histories(self) -> Mapping[int, History]:
        """Return each tensor's inner history, of one virtual worker after another; on rank 0
        followed by its outer history.
        """
        of_each = [own.histories() for own in self._inner]
        inner = {
            index: [array for own in of_each for array in own.get(index, ())]
            for index in range(len(self._counts))
        }
        outer = None if self._outer_histories is None else self._outer_histories()
        if self._barrier is not None:
            self._barrier()
        if outer is None:
            return inner
        return {index: [*own, *outer[index]] for index, own in inner.items()}

    def split(
        self, histories: Sequence[History] | None
    ) -> tuple[list[list[History] | None], list[History] | None]:
        """Return the inner histories of each virtual worker, and the outer ones; None for those
        that are not there. Where `hold_back` was given inner ones, the histories are the outer ones.
        """
        workers = len(self._inner)
        if not histories:
            return [None] * workers, None
        if any(name in self._given for name in self._parts()):
            return [None] * workers, [list(history) for history in histories]
        pairs = list(zip(self._counts, histories, strict=True))
        outer = [history[n * workers : n * workers + self._outer_arrays] for n, history in pairs]
        if not any(self._counts):
            return [None] * workers, (outer if all(outer) else None)
        inner: list[list[History] | None] = [
            [history[n * at : n * (at + 1)] for n, history in pairs] for at in range(workers)
        ]
        return inner, (outer if all(outer) else None)

    def bring(self, control: JobControl) -> None:
        """Take the inner histories that `hold_back` was given, here or on rank 0, once the exchange
        is open. All workers call it together.
        """
        parts, given = self._parts(), self._given
        self._given = {}
        for name in parts.keys() & given.keys():
            parts[name].copy_(torch.from_numpy(given[name]))
        bring_parts(parts, given, control, rank=self._rank)

    def _parts(self) -> dict[str, Tensor]:
        return {
            f"{own.trained.name}, inner history {number} of {worker}": history
            for worker, inner in zip(self._own, self._inner, strict=True)
            for own in inner.of.values()
            for number, history in enumerate(own.history)
        }

    def keep(self, into: Mapping[int, History]) -> Coming[KeptHistories]:
        """See `CarrierState`: the outer histories; `parts` has the inner ones."""
        kept = super().keep(into)
        return Coming.here(kept.result()) if self.overtaken else kept

    def parts(self) -> Mapping[str, Tensor]:
        return {**super().parts(), **self._parts()}

    def replicated(self) -> Mapping[str, Tensor]:
        anchors = {f"{anchor.name}, anchor": anchor.tensor for anchor in self._anchors}
        return {**anchors, **super().replicated()}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        super().hold_back(held_back)
        self._given = held_back


class DelayedMomentum:
    """The momentum of all tensors on rank 0, and the histories of the outer rule: of local steps at
    staleness > 0, where rounds of different workers end at different times.

    Each worker sends its outer gradient without momentum, and the shards add 1/N of the change as
    it comes. Rank 0 adds the momentum, once in each of its rounds, about every N-th change (delayed
    Nesterov: Liu et al., 2024, with c = 0). Over one of its rounds it sees how far all workers
    together have moved the anchors, and sends the momentum of that as a change of its own.

    Symbols, for one tensor, in the sign of Caffe's history: t what all workers have subtracted from
    the anchor since rank 0's last round, without momentum; h <- b h + t the history; e what rank 0
    subtracts on top: b h (Nesterov), or b times the history before.

    Law: each change counts in exactly one t, also across a snapshot.

    Args:
        anchors: of all tensors. No rule moves statistics.
        options: rate and momentum, and its kind.
        workers: N.
    """

    def __init__(self, anchors: Sequence[Trained], options: ExchangeOptions, workers: int) -> None:
        self._anchors = [anchor.tensor for anchor in anchors]
        self._indices = [index for index, anchor in enumerate(anchors) if not anchor.statistics]
        self._options = options
        self._factor = workers / options.outer_lr
        self._history, self._moved, self._seen, self._extra = (
            [torch.zeros_like(anchor) for anchor in self._anchors] for _ in range(4)
        )

    def load(self, histories: Sequence[History] | None) -> None:
        """Continue from the histories of a snapshot: h, and t so far where it is known.

        The anchors have come.
        """
        for index in self._indices:
            own = self._history[index], self._moved[index]
            for tensor, array in zip_longest(own, histories[index] if histories else ()):
                tensor.zero_()
                if array is not None:
                    tensor.copy_(torch.from_numpy(array).view_as(tensor))
            self._seen[index].copy_(self._anchors[index])
            self._extra[index].zero_()

    def add_to(self, gradient: Tensor, index: int) -> None:
        """Add what rank 0 subtracts to its outer gradient, at the end of a round."""
        gradient.add_(self.next_extra(index), alpha=self._factor)

    def next_extra(self, index: int) -> Tensor:
        """Return e at the end of a round of rank 0, whose anchor is as it was read for the
        round.
        """
        self._note(index)
        history, moved, extra = self._history[index], self._moved[index], self._extra[index]
        momentum, nesterov = self._options.outer_momentum, self._options.outer_nesterov
        if not nesterov:
            torch.mul(history, momentum, out=extra)
        history.mul_(momentum).add_(moved)
        if nesterov:
            torch.mul(history, momentum, out=extra)
        moved.zero_()
        return extra

    def settle(self) -> None:
        """Note that all changes have come, and are in the anchors."""
        for index in self._indices:
            self._note(index)
            self._extra[index].zero_()

    def _note(self, index: int) -> None:
        """Add to t what has been subtracted from the anchor since it was last seen, but for rank
        0's own e.
        """
        anchor, seen = self._anchors[index], self._seen[index]
        self._moved[index].add_(seen).sub_(anchor).sub_(self._extra[index])
        seen.copy_(anchor)

    def histories(self) -> dict[int, History]:
        """Return h and t of each tensor, by index."""
        pairs = enumerate(zip(self._history, self._moved, strict=True))
        return {index: [tensor.cpu().numpy().copy() for tensor in pair] for index, pair in pairs}
