"""What a snapshot holds of local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from poseidon.exchange.base import Array, History, Trained
from poseidon.exchange.carrier import CarrierState
from poseidon.exchange.exchange import ExchangeState
from poseidon.exchange.local_histories import LocalHistories


class RoundsState(CarrierState):
    """Each worker has inner histories of its own; the outer history is that of the outer exchange.

    Args:
        inner: the histories of this worker's rules; none where an optimizer of the caller keeps
            them.
        outer: the state of the outer exchange.
        anchors: the tensors of the outer exchange.
        counts: for each tensor the number of its inner history arrays.
        outer_arrays: the most arrays of a tensor's outer history.
        outer_histories: returns the outer histories; None where this worker does not read them:
            rank 0 does.
    """

    private = True

    def __init__(
        self,
        inner: LocalHistories,
        outer: ExchangeState,
        anchors: Sequence[Trained],
        counts: Sequence[int],
        *,
        outer_histories: Callable[[], Sequence[History]] | None,
        outer_arrays: int = 1,
    ) -> None:
        self._inner = inner
        self._outer = outer
        self._anchors = anchors
        self._counts = counts
        self._outer_arrays = outer_arrays
        self._outer_histories = outer_histories

    def histories(self) -> Mapping[int, History]:
        """Return each tensor's inner history; on rank 0 followed by its outer history."""
        inner = self._inner.histories() or {index: [] for index in range(len(self._counts))}
        if self._outer_histories is None:
            return inner
        outer = self._outer_histories()
        return {index: [*own, *outer[index]] for index, own in inner.items()}

    def split(
        self, histories: Sequence[History] | None
    ) -> tuple[list[History] | None, list[History] | None]:
        """Return the inner and the outer histories; None for those that are not there."""
        if not histories:
            return None, None
        pairs = list(zip(self._counts, histories, strict=True))
        outer = [history[count : count + self._outer_arrays] for count, history in pairs]
        inner = [history[:count] for count, history in pairs]
        return (inner if any(self._counts) else None), (outer if all(outer) else None)

    def replicated(self) -> Mapping[str, Tensor]:
        anchors = {f"{anchor.name}, anchor": anchor.tensor for anchor in self._anchors}
        return {**anchors, **self._outer.replicated()}

    def held_back(self) -> Mapping[str, Array]:
        return self._outer.held_back()

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        self._outer.hold_back(held_back)
