"""Delayed momentum: the outer momentum of local steps at staleness > 0, where rounds
of different workers end at different times.

Each worker sends its outer gradient without momentum, and the shards add 1/N of the change as it
comes. Rank 0 adds the momentum, once in each of its rounds, about every N-th change (delayed
Nesterov: Liu et al., 2024, with c = 0). Over one of its rounds it sees how far all workers together
have moved the anchors, and sends the momentum of that as a change of its own.

Symbols, for one tensor, in the sign of Caffe's history: t what all workers have subtracted from the
anchor since rank 0's last round, without momentum; h <- b h + t the history; e what rank 0
subtracts on top: b h (Nesterov), or b times the history before.

Law: each change counts in exactly one t, also across a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from poseidon.exchange.base import History
from poseidon.exchange.options import ExchangeOptions


class DelayedMomentum:
    """The momentum of all tensors on rank 0, and the histories of the outer rule.

    Args:
        anchors: of all tensors.
        statistics: for each tensor whether it is statistics, which no rule moves.
        options: momentum and its kind.
    """

    def __init__(
        self, anchors: Sequence[Tensor], statistics: Sequence[bool], options: ExchangeOptions
    ) -> None:
        self._anchors = anchors
        self._indices = [index for index, is_one in enumerate(statistics) if not is_one]
        self._momentum = options.outer_momentum
        self._nesterov = options.outer_nesterov
        self._history, self._moved, self._seen, self._extra = (
            [torch.zeros_like(anchor) for anchor in anchors] for _ in range(4)
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

    def next_extra(self, index: int) -> Tensor:
        """Return e at the end of a round of rank 0, whose anchor is as it was read for the
        round.
        """
        self._note(index)
        history, moved, extra = self._history[index], self._moved[index], self._extra[index]
        if not self._nesterov:
            torch.mul(history, self._momentum, out=extra)
        history.mul_(self._momentum).add_(moved)
        if self._nesterov:
            torch.mul(history, self._momentum, out=extra)
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
