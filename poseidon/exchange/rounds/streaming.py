"""Streaming local steps: parts of the tensors are exchanged at different iterations of a round, while workers train on.

It is `local_steps.py` with two changes (Streaming DiLoCo: Douillard et al., 2025):

* The tensors form P fragments, consecutive ones of about equal size. Fragment p sends its outer gradient after the
  iterations that are (p + 1) H / P, rounded down, plus multiples of H. So the
  link carries a part of the bytes at a time.
* D local steps are made while a fragment travels. Then each worker mixes what has come with what it has: value <- a
  value + (1 - a) anchor. With D = 0 the value is the anchor.

Laws:

* A fragment's tables have a clock of their own, the number of its exchanges, on shards and workers (`Session`).
* The client's clock counts exchanges of any fragment: P to a round.
* With a delay, outer gradients are encoded and sent by a thread while the worker trains.
* `settle` ends the round of every fragment early, after what travels has come: all values are then anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from poseidon.exchange.base import (
    ExchangeSettings,
    ExchangeState,
    History,
    Trained,
    WholeGradients,
)
from poseidon.exchange.control import JobControl
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.rounds.local_steps import LocalStepsState, RoundDelivery
from poseidon.exchange.single import SingleProcessExchange
from ps_server import RuleKind
from ps_server.rules import history_count, update


def fragments_of(sizes: Sequence[int], count: int) -> list[range]:
    """Return the indices of the tensors of each fragment: consecutive ones, at least one, about equally many elements.

    Args:
        sizes: elements of each tensor.
        count: number of fragments; fewer if there are fewer tensors.
    """
    count = max(1, min(count, len(sizes)))
    ends = list(accumulate(sizes))
    starts = [0]
    for fragment in range(1, count):
        share = ends[-1] * fragment / count
        nearest = min(range(len(sizes)), key=lambda i: abs(ends[i] - share)) + 1
        starts.append(min(max(nearest, starts[-1] + 1), len(sizes) - (count - fragment)))
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


class TablesExchange(Protocol):
    """An exchange whose tensors are exchanged one by one: `ServerExchange` over a client with table clocks."""

    @property
    def state(self) -> ExchangeState:
        """See `Exchange`."""

    @property
    def control(self) -> JobControl:
        """See `Exchange`."""

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`; called once for all exchanges of all tensors."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""

    def push_statistics(self, index: int) -> None:
        """Push the present values of statistics."""

    def wait(self, index: int) -> None:
        """See `Exchange`."""

    def end_iteration(self) -> None:
        """Count the exchange of a fragment."""

    def settle(self) -> None:
        """See `Exchange`."""

    def close(self) -> None:
        """See `Exchange`."""


class AloneTables(SingleProcessExchange):
    """See `TablesExchange`: that of one worker, which applies the rule at once."""

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        rule, history = self._tensors[index].rule, self.state.of[index]
        update(rule, gradient.view(-1), history, self._flat[index], rate=self._rate, step=0)

    def push_statistics(self, index: int) -> None:
        """See `TablesExchange`."""

    def end_iteration(self) -> None:
        """See `TablesExchange`."""
        self._set_iteration(self._iteration + 1)


class _Fragment:
    """The state of one fragment.

    Args:
        indices: its tensors.
        offset: it sends after iterations of this number, modulo the steps of a round.
    """

    def __init__(self, indices: range, offset: int) -> None:
        self.indices = indices
        self.offset = offset
        self.steps = 0  # since the values were the anchors
        self.sent_at: int | None = None  # the iteration, while it travels
        self.exact = True  # whether what comes takes the place of the values


class StreamingExchange(WholeGradients):
    """See `Exchange`, and `LocalStepsExchange` for tensors that an optimizer of the caller changes.

    Args:
        outer: the exchange of the anchors, which this exchange closes.
        tensors: the tensors of this worker.
        anchors: made by `anchors_of`.
        settings: common to all tensors.
        options: rounds, fragments, delay and mix.
    """

    def __init__(
        self,
        outer: TablesExchange,
        tensors: Sequence[Trained],
        anchors: Sequence[Trained],
        settings: ExchangeSettings,
        options: ExchangeOptions,
    ) -> None:
        self._outer = outer
        self._options = options
        self._values = [trained.tensor.detach() for trained in tensors]
        self._anchors = [anchor.tensor for anchor in anchors]
        self._outer_gradients = [
            None if trained.statistics else torch.empty_like(anchor)
            for trained, anchor in zip(tensors, self._anchors, strict=True)
        ]
        steps, parts = (
            options.sync_every,
            fragments_of([v.numel() for v in self._values], options.sync_fragments),
        )
        self._fragments = [
            _Fragment(indices, (number + 1) * steps // len(parts) % steps)
            for number, indices in enumerate(parts)
        ]
        self._fragment_of = [fragment for fragment in self._fragments for _ in fragment.indices]
        self._due: set[int] = set()
        self._by_caller = any(trained.rule.kind is RuleKind.MEAN for trained in tensors)
        self._inner = SingleProcessExchange([] if self._by_caller else tensors, settings)
        self._iteration = self._exchanges = settings.start_clock
        # A worker has read fragment k - m, and so has rank 0's push of it, before it ends exchange k. An exchange takes
        # at least H // P iterations. `Session.signal` reckons with m = 1.
        spacing = steps // len(parts)
        self._delivery = RoundDelivery(outer.control, lag=-(-(options.sync_delay + 1) // spacing) - 1)
        self._delivery.next_end = self._next_end()
        self.control = JobControl(self._delivery, root=outer.control.root)
        counts = [0 if self._by_caller else history_count(trained.rule.kind) for trained in tensors]
        self.state = LocalStepsState(
            self._inner.state, outer.state, anchors, counts, reads_outer=outer.control.root
        )

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `LocalStepsExchange.open`."""
        inner, outer = self.state.split(histories)
        if clock is not None:
            self._iteration = self._exchanges = clock
            self._delivery.next_end = self._next_end()
        self._inner.open(inner, clock)
        for anchor, value in zip(self._anchors, self._values, strict=True):
            anchor.copy_(value)
        self._outer.open(outer, clock)
        self._outer.start(self._exchanges, self._options.outer_lr)
        self._take_anchors()

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        if not self._by_caller:
            self._inner.begin(index, gradient)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if index not in self._due:
            return
        self._due.discard(index)
        self._outer.wait(index)
        value, anchor = self._values[index], self._anchors[index]
        if self._fragment_of[index].exact:
            value.copy_(anchor)
        else:
            value.lerp_(anchor, 1 - self._options.sync_mix)

    def finish(self) -> None:
        """See `Exchange`."""
        self._wait_all()
        self._inner.finish()
        self._iteration += 1
        for fragment in self._fragments:
            fragment.steps += 1
            if (
                fragment.sent_at is not None
                and self._iteration >= fragment.sent_at + self._options.sync_delay
            ):
                self._arrive(fragment)
        if self._by_caller:
            self._wait_all()  # what has come is not behind what leaves now
        for fragment in self._fragments:
            if self._iteration % self._options.sync_every == fragment.offset:
                self._end_round(fragment)
        if self._by_caller:
            self._wait_all()

    def _end_round(self, fragment: _Fragment) -> None:
        self._wait_for(fragment)
        self._send(fragment)
        if not self._options.sync_delay:
            self._arrive(fragment)
        self._outer.end_iteration()
        self._exchanges += 1
        self._delivery.end_round(self._iteration, self._exchanges, next_end=self._next_end())

    def settle(self) -> None:
        """See `Exchange`. The round of each fragment that has steps ends."""
        for fragment in self._fragments:
            if fragment.sent_at is not None:
                self._arrive(fragment)
        self._wait_all()
        for fragment in self._fragments:
            if fragment.steps:
                self._send(fragment)
                fragment.sent_at = None
        self._outer.settle()
        self._take_anchors()

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()
        self._outer.close()

    # -- internals -----------------------------------------------------------------------------------------

    def _next_end(self) -> int:
        """Return the next iteration after which a fragment sends."""
        steps = self._options.sync_every
        return min(self._iteration + (f.offset - self._iteration - 1) % steps + 1 for f in self._fragments)

    def _wait_all(self) -> None:
        for index in sorted(self._due):
            self.wait(index)

    def _wait_for(self, fragment: _Fragment) -> None:
        for index in fragment.indices:
            self.wait(index)

    def _send(self, fragment: _Fragment) -> None:
        """Send what this worker has learned since the last exchange of a fragment."""
        ready: list[tuple[int, Tensor]] = []
        for index in fragment.indices:
            gradient, anchor = self._outer_gradients[index], self._anchors[index]
            if gradient is None:
                anchor.copy_(self._values[index])
                self._outer.push_statistics(index)
            else:
                ready.append((index, torch.sub(anchor, self._values[index], out=gradient)))
        for index, gradient in ready:  # a thread that encodes them would slow the differences down
            self._outer.begin(index, gradient)
        fragment.sent_at, fragment.steps = self._iteration, 0

    def _arrive(self, fragment: _Fragment) -> None:
        """Let the next use of a fragment wait for what travels."""
        fragment.sent_at = None
        fragment.exact = fragment.steps == 0 or self._options.sync_mix == 0
        if fragment.exact:
            fragment.steps = 0
        self._due.update(fragment.indices)

    def _take_anchors(self) -> None:
        """Set the values to the anchors, which have come."""
        self._due.clear()
        for fragment in self._fragments:
            fragment.steps, fragment.sent_at = 0, None
        torch._foreach_copy_(self._values, self._anchors)
