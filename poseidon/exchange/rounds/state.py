"""What a snapshot holds of local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.broadcast import bring_parts
from poseidon.exchange.carrier import KeptHistories, UnitedState
from poseidon.exchange.exchange import ExchangeState
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.local_histories import LocalHistories


class RoundsState(UnitedState):
    """Each worker has inner histories of its own; the outer history is the outer exchange's.

    Args:
        inner: the histories of the rules of each virtual worker of this process; none where an
            optimizer of the caller keeps them.
        anchors: the tensors of the outer exchange.
        outer_arrays: the most arrays of a tensor's outer history.
        outer_histories: returns the outer histories; None where this worker does not read them:
            rank 0 does.
        barrier: waits for all workers, where others may otherwise continue before this worker has
            the outer histories (`rounds/quorum.py`); None: they may not.
    """

    def __init__(
        self,
        inner: Sequence[LocalHistories],
        outer: ExchangeState,
        anchors: Sequence[Trained],
        *,
        own: range,
        outer_histories: Callable[[], Mapping[int, History]] | None,
        outer_arrays: int = 1,
        barrier: Callable[[], object] | None = None,
    ) -> None:
        super().__init__([outer])
        self.private, self.overtaken = True, barrier is not None
        self._barrier = barrier
        self._inner = inner
        self._anchors = anchors
        self._own = own
        self._given: Mapping[str, Array] = {}
        self._counts = [len(inner[0].of.get(index, ())) for index in range(len(anchors))]
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

    def bring(self, control: JobControl, rank: int) -> None:
        """Take the inner histories that `hold_back` was given, here or on rank 0, once the exchange
        is open. All workers call it together.
        """
        parts, given = self._parts(), self._given
        self._given = {}
        for name in parts.keys() & given.keys():
            parts[name].copy_(torch.from_numpy(given[name]))
        bring_parts(parts, given, control, rank=rank)

    def _parts(self) -> dict[str, Tensor]:
        return {
            f"{self._anchors[index].name}, inner history {number} of {worker}": history
            for worker, own in zip(self._own, self._inner, strict=True)
            for index, histories in own.of.items()
            for number, history in enumerate(histories)
        }

    def keep(self, into: Mapping[int, History]) -> KeptHistories:
        """See `CarrierState`: the outer histories; `parts` has the inner ones."""
        kept = super().keep(into)
        return KeptHistories.here(kept.result()) if self.overtaken else kept

    def parts(self) -> Mapping[str, Tensor]:
        return {**super().parts(), **self._parts()}

    def replicated(self) -> Mapping[str, Tensor]:
        anchors = {f"{anchor.name}, anchor": anchor.tensor for anchor in self._anchors}
        return {**anchors, **super().replicated()}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        super().hold_back(held_back)
        self._given = held_back
