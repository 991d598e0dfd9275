"""Local steps: workers train alone for a round of iterations, then an outer rule joins what they have learned.

In a round of H iterations each worker changes its own tensors by its own rule, on its own gradients, and sends nothing.
At the end of the round it sends an outer gradient for each tensor: anchor - value. The anchor is the value that all
workers began the round with. The outer exchange averages the outer gradients over the workers and applies the outer
rule to the anchors. All workers begin the next round with the new anchors. It is DiLoCo (Douillard et al., 2023); with
the outer rate 1 and the outer momentum 1 - 1/W it is BMUF (Chen and Huo, ICASSP 2016); with the outer rate 1 and no
momentum, averages of the workers.

The outer exchange is any exchange of the anchors. One of its iterations is one
round, so clocks and staleness count rounds.

Laws:

* A round ends after each iteration whose number is a multiple of H, on all workers.
* `settle` ends a round early, on all workers after the same iteration: the anchors of snapshots and tests have every
  worker's steps. The next round then ends at the next multiple of H.
* At the end of a round the values of all workers are equal, so a snapshot holds one set of values, the
  outer history, and the inner history of each worker.
* A request of rank 0 names a round. It takes effect at the end of the first round that is whole to its end and not
  before the named one, on all workers after the same iteration (`RoundDelivery`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from poseidon.exchange.base import (
    Array,
    Exchange,
    ExchangeSettings,
    ExchangeState,
    History,
    LocalHistories,
    Trained,
    WholeGradients,
)
from poseidon.exchange.control import JobControl
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.rounds.delayed_momentum import DelayedMomentum
from poseidon.exchange.single import SingleProcessExchange
from ps_server import Collection, Rule, RuleKind, Signal, SignalKind
from ps_server.rules import history_count


def outer_rule(options: ExchangeOptions, *, delayed: bool = False) -> Rule:
    """Return the rule of the anchors.

    Caffe's Nesterov rule with a constant rate is DiLoCo's: m <- b m + g; w <- w - lr (g + b m).

    Args:
        options: rate, momentum and its kind.
        delayed: whether rank 0 adds the momentum (`delayed_momentum.py`).
    """
    if delayed:
        return Rule()
    kind = RuleKind.NESTEROV if options.outer_nesterov else RuleKind.SGD
    return Rule(kind=kind, momentum=options.outer_momentum)


def anchors_of(tensors: Sequence[Trained], rule: Rule) -> list[Trained]:
    """Return what the outer exchange keeps together: a copy of each tensor, with the outer rule."""
    return [replace(trained, tensor=_copy(trained.tensor), rule=rule, factor_rows=0) for trained in tensors]


def is_synchronous(options: ExchangeOptions, tensors: Sequence[Trained], settings: ExchangeSettings) -> bool:
    """Return whether local steps are synchronous training, and the synchronous exchange takes their place.

    With one step a round, the outer rate 1, no outer momentum and plain SGD inside, the new value is the mean of w - r
    g over the workers: w - r mean(g). The two sides differ in float32 rounding. The synchronous exchange computes the
    right one.
    """
    return (
        options.one_plain_step
        and settings.clip is None
        and all(t.statistics or (t.rule.kind, t.rule.momentum) == (RuleKind.SGD, 0.0) for t in tensors)
    )


class LocalStepsExchange(WholeGradients):
    """See `Exchange`.

    A tensor whose rule is `RuleKind.MEAN` is changed by an optimizer of the caller, between its `begin` and `finish`;
    its gradient is not used. At staleness 0 `finish` then returns with the new values at the end of a round. Otherwise
    they come while the next iteration runs, as in other exchanges.

    Beyond the contract, `settle` may come after `start`, before the first `begin`. The iteration is then started again.

    Args:
        outer: the exchange of the anchors, which this exchange closes.
        tensors: the tensors of this worker.
        anchors: made by `anchors_of`.
        settings: common to all tensors. The limit on the gradients' norm is for this worker's own gradients.
        options: steps of a round, and the outer rate.
        delayed: number of all workers, where rank 0 adds the outer momentum
            (`delayed_momentum.py`); 0: the outer rule has it.
    """

    def __init__(
        self,
        outer: Exchange,
        tensors: Sequence[Trained],
        anchors: Sequence[Trained],
        settings: ExchangeSettings,
        options: ExchangeOptions,
        *,
        delayed: int = 0,
    ) -> None:
        self._outer = outer
        self._steps = options.sync_every
        self._outer_rate = options.outer_lr
        self._values = [trained.tensor.detach() for trained in tensors]
        self._anchors = [anchor.tensor for anchor in anchors]
        self._outer_gradients = [
            None if trained.statistics else torch.empty_like(anchor)
            for trained, anchor in zip(tensors, self._anchors, strict=True)
        ]
        self._by_caller = any(trained.rule.kind is RuleKind.MEAN for trained in tensors)
        self._inner = SingleProcessExchange([] if self._by_caller else tensors, settings)
        self._round = settings.start_clock
        self._iteration = settings.start_clock
        self._in_round = False
        self._steps_done = 0
        self._pending: set[int] = set()
        self._delivery = RoundDelivery(outer.control)
        self._delivery.next_end = self._next_end()
        self.control = JobControl(self._delivery, root=outer.control.root)
        counts = [0 if self._by_caller else history_count(trained.rule.kind) for trained in tensors]
        root, outer_state = outer.control.root, outer.state
        self._momentum: DelayedMomentum | None = None
        if delayed and root:
            outer_state = self._momentum = DelayedMomentum(
                self._anchors, [trained.statistics for trained in tensors], options
            )
        self._momentum_factor = delayed / options.outer_lr
        self._arrives_at_once = self._by_caller and not delayed
        self.state = LocalStepsState(
            self._inner.state,
            outer_state,
            anchors,
            counts,
            outer_arrays=2 if delayed else 1,
            reads_outer=root,
        )

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`. A tensor's history is that of its own rule, then that of the outer rule where it is known."""
        inner, outer = self.state.split(histories)
        if clock is not None:
            self._round = self._iteration = clock
            self._delivery.next_end = self._next_end()
        self._inner.open(inner, clock)
        for anchor, value in zip(self._anchors, self._values, strict=True):
            anchor.copy_(value)
        self._outer.open(None if self._momentum else outer, clock)
        self._in_round, self._steps_done = False, 0
        self._take_all()
        if self._momentum is not None:
            self._momentum.load(outer)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        self._iteration = iteration
        self._inner.start(iteration, rate)
        if not self._in_round:
            self._outer.start(self._round, self._outer_rate)
            self._in_round = True
            self._pending = set(range(len(self._values)))

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        if not self._by_caller:
            self._inner.begin(index, gradient)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        if index in self._pending:
            self._pending.discard(index)
            self._outer.wait(index)
            self._values[index].copy_(self._anchors[index])

    def finish(self) -> None:
        """See `Exchange`."""
        self._wait_all()
        self._inner.finish()
        self._iteration += 1
        self._steps_done += 1
        if self._iteration % self._steps:
            return
        self._end_round()
        self._delivery.end_round(self._iteration, self._round, next_end=self._next_end())
        if self._arrives_at_once:
            self._outer.settle()
            self._take_all()

    def settle(self) -> None:
        """See `Exchange`. A round that has steps ends."""
        self._wait_all()
        if self._steps_done:
            self._end_round()
        if not self._in_round:
            self._outer.settle()
            self._take_all()
            if self._momentum is not None:
                self._momentum.settle()

    def close(self) -> None:
        """See `Exchange`."""
        self._inner.close()
        self._outer.close()

    # -- internals -----------------------------------------------------------------------------------------

    def _next_end(self) -> int:
        """Return the iteration at whose end the next whole round ends."""
        return (self._iteration // self._steps + 1) * self._steps

    def _wait_all(self) -> None:
        for index in sorted(self._pending):
            self.wait(index)

    def _end_round(self) -> None:
        """Send what this worker has learned in the round."""
        for index, (anchor, value) in enumerate(zip(self._anchors, self._values, strict=True)):
            gradient = self._outer_gradients[index]
            if gradient is None:  # statistics leave in `finish`
                anchor.copy_(value)
                continue
            torch.sub(anchor, value, out=gradient)
            if self._momentum is not None:
                gradient.add_(self._momentum.next_extra(index), alpha=self._momentum_factor)
            self._outer.begin(index, gradient)
        self._outer.finish()
        self._round += 1
        self._in_round, self._steps_done = False, 0

    def _take_all(self) -> None:
        """Set the values to the anchors, which have come."""
        self._pending.clear()
        torch._foreach_copy_(self._values, self._anchors)


class LocalStepsState:
    """See `ExchangeState`. Each worker has inner histories of its own; the outer history is that of the outer exchange.

    Args:
        inner: the histories of this worker's rules; none where an optimizer of the caller keeps them.
        outer: the state of the outer exchange.
        anchors: the tensors of the outer exchange.
        counts: for each tensor the number of its inner history arrays.
        outer_arrays: the most arrays of a tensor's outer history.
        reads_outer: whether this worker reads the outer histories: rank 0.
    """

    private = True

    def __init__(
        self,
        inner: LocalHistories,
        outer: ExchangeState,
        anchors: Sequence[Trained],
        counts: Sequence[int],
        *,
        reads_outer: bool,
        outer_arrays: int = 1,
    ) -> None:
        self._inner = inner
        self._outer = outer
        self._anchors = anchors
        self._counts = counts
        self._outer_arrays = outer_arrays
        self._reads_outer = reads_outer

    def histories(self) -> list[History]:
        """See `ExchangeState`. Each tensor's inner history; on rank 0 followed by its outer history."""
        inner = self._inner.histories() or [[] for _ in self._counts]
        if not self._reads_outer:
            return inner
        outer = self._outer.histories()
        return [[*own, *shared] for own, shared in zip(inner, outer, strict=True)]

    def split(self, histories: Sequence[History] | None) -> tuple[list[History] | None, list[History] | None]:
        """Return the inner and the outer histories; None for those that are not there."""
        if not histories:
            return None, None
        pairs = list(zip(self._counts, histories, strict=True))
        outer = [history[count : count + self._outer_arrays] for count, history in pairs]
        inner = [history[:count] for count, history in pairs]
        return (inner if any(self._counts) else None), (outer if all(outer) else None)

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`. After `settle` the anchors are equal, too."""
        anchors = {f"{anchor.name}, anchor": anchor.tensor for anchor in self._anchors}
        return {**anchors, **self._outer.replicated()}

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        return self._outer.held_back()

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        self._outer.hold_back(held_back)


class RoundDelivery:
    """See `Delivery`. Requests of the outer exchange, whose clocks are rounds, with clocks that are iterations.

    All workers see a request before they end the round that it names (`Delivery`'s law for the outer exchange). All end
    the same rounds after the same iterations. So all give a request the same iteration, before they end it.

    Args:
        outer: the job control of the outer exchange.
        lag: rounds by which a worker may be further ahead of the others than the outer exchange knows.

    Attributes:
        next_end: the iteration at whose end the next whole round ends.
    """

    def __init__(self, outer: JobControl, *, lag: int = 0) -> None:
        self._outer = outer
        self._lag = lag
        self._due: dict[Signal, int] = {}
        self.next_end = 0

    def end_round(self, iteration: int, rounds: int, *, next_end: int) -> None:
        """Note that a whole round has ended, after so many iterations and rounds."""
        for signal in self._outer.requests:
            if signal.clock + self._lag <= rounds:
                self._due.setdefault(signal, iteration)
        self.next_end = next_end

    def gather(self, payload: bytes) -> Collection:
        """See `Delivery`."""
        return self._outer.gather(payload)

    def request(self, kind: SignalKind) -> None:
        """See `Delivery`."""
        self._outer.request(kind)

    @property
    def requests(self) -> tuple[Signal, ...]:
        """See `Delivery`. A request whose round has not ended has the earliest iteration that it may get."""
        return tuple(
            Signal(signal.kind, self._due.get(signal, self.next_end)) for signal in self._outer.requests
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
