"""What the virtual workers of a process keep apart within a round of local steps: values and inner
histories.

Law: the module has the values of the virtual worker whose turn it is; between two iterations, the
first one's. So passes, hooks and updates work on the module's tensors, whoever's turn it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.exchange.alone import AloneCarrier
from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.local_histories import LocalHistories
from ps_server.rules import clip_factor


class InnerWorkers:
    """The virtual workers of a process, each with a rule, histories and values of its own.

    One virtual worker has its values in the module alone. Several have a copy each besides.

    Args:
        settings: common to all tensors; the limit is for the gradients of each virtual worker.
        by_caller: whether an optimizer of the caller changes the values, which keeps its own state.
    """

    def __init__(
        self,
        tensors: Sequence[Trained],
        settings: ExchangeSettings,
        *,
        count: int,
        by_caller: bool,
    ) -> None:
        self.count = count
        self._values = [trained.tensor.detach() for trained in tensors]
        self._carriers = [
            AloneCarrier([] if by_caller else tensors, settings) for _ in range(count)
        ]
        self.histories: list[LocalHistories] = [carrier.state for carrier in self._carriers]
        self._by_caller = by_caller
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
        if not self._by_caller:
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
        if self._clip is not None and not self._by_caller:
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
