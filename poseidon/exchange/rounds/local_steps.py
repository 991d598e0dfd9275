"""Local steps: workers train alone for a round of iterations, then an outer rule joins what they
have learned.

In a round of H iterations each worker changes its own tensors by its own rule, on its own
gradients, and sends nothing. At the end of the round it sends an outer gradient for each tensor:
anchor - value. The anchor is the value that all workers began the round with. The outer exchange
averages the outer gradients over the workers and applies the outer rule to the anchors. All workers
begin the next round with the new anchors. It is DiLoCo (Douillard et al., 2023); with the outer
rate 1 and the outer momentum 1 - 1/W it is BMUF (Chen and Huo, ICASSP 2016); with the outer rate 1
and no momentum, averages of the workers.

Streaming (Streaming DiLoCo: Douillard et al., 2025) spreads the exchange over the round:

* The tensors form P fragments, with rounds of their own. Fragment p sends its
  outer gradient after the iterations that are (p + 1) H / P, rounded down, plus multiples of H. So
  the link carries a part of the bytes at a time.
* D local steps are made while a fragment travels. Then each worker mixes what has come with what it
  has: value <- a value + (1 - a) anchor. With D = 0 the value is the anchor.

Whole rounds are one fragment without a delay. The outer exchange is then any exchange of the
anchors. One of its iterations is one round, so clocks and staleness count rounds. Otherwise each
iteration of the outer exchange is the exchange of one fragment: other tensors take no part in it,
and each table of the server has a clock of its own, the number of its exchanges. With a delay,
outer gradients are encoded and sent by a thread while the worker trains.

Laws:

* With whole rounds a round ends after each iteration whose number is a multiple of H, on all
  workers.
* `settle` ends the round of every fragment early, after what travels has come, on all workers after
  the same iteration: the anchors of snapshots and tests have every worker's steps. The next round
  then ends at its usual iteration.
* Where all fragments have settled the values of all workers are equal, so a snapshot holds one set
  of values, the outer history, and the inner history of each worker.
* A worker is a virtual one where a process computes for several: each has values and an inner
  history of its own (`state.py`). Their outer gradients meet in the outer exchange, in the
  tree of virtual workers.
* Where a quorum of the workers ends a round (`quorum.py`), a late worker leaves iterations out, so
  its next round ends at another iteration.
* A request of rank 0 names a round. It takes effect at the end of the first round that is whole to
  its end and not before the named one, on all workers after the same iteration (`RoundControl`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.carrier import Carrier, Step
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.membership import Membership
from poseidon.exchange.observer import Traffic
from poseidon.exchange.options import ExchangeOptions
from poseidon.exchange.rounds.quorum import QuorumRounds, RoundControl
from poseidon.exchange.rounds.state import DelayedMomentum, InnerWorkers, RoundsState
from ps_server import Rule, RuleKind
from ps_server.monitor import Interruption

_PLAIN = (RuleKind.SGD, RuleKind.TORCH_SGD)


def outer_rule(options: ExchangeOptions, *, delayed: bool = False) -> Rule:
    """Return the rule of the anchors.

    Caffe's Nesterov rule with a constant rate is DiLoCo's: m <- b m + g; w <- w - lr (g + b m).

    Args:
        options: rate, momentum and its kind.
        delayed: whether rank 0 adds the momentum (`DelayedMomentum`).
    """
    if delayed:
        return Rule()
    kind = RuleKind.NESTEROV if options.outer_nesterov else RuleKind.SGD
    return Rule(kind=kind, momentum=options.outer_momentum)


def anchors_of(tensors: Sequence[Trained], rule: Rule) -> list[Trained]:
    """Return what the outer exchange keeps together: a copy of each tensor, with the outer rule."""
    return [
        replace(
            trained,
            tensor=trained.tensor.detach().clone(memory_format=torch.contiguous_format),
            rule=rule,
            rate_index=0,
            factor_rows=0,
        )
        for trained in tensors
    ]


def is_synchronous(
    options: ExchangeOptions, tensors: Sequence[Trained], settings: ExchangeSettings
) -> bool:
    """Return whether local steps are synchronous training, and the synchronous exchange takes
    their place.

    With one step a round, the outer rate 1, no outer momentum and plain SGD inside, the new value
    is the mean of w - r g over the workers: w - r mean(g). The two sides differ in float32
    rounding. The synchronous exchange computes the right one.
    """
    return (
        options.one_plain_step
        and settings.clip is None
        and all(t.statistics or (t.rule.kind in _PLAIN and t.rule.momentum == 0) for t in tensors)
    )


def fragments_of(sizes: Sequence[int], count: int) -> list[range]:
    """Return the indices of the tensors of each fragment: consecutive ones, at least one, about
    equally many elements.

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
    return [
        range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)
    ]


class Fragment:
    """The state of one fragment.

    Args:
        offset: it sends after iterations of this number, modulo the steps of a round.
        is_awaited: whether a round ends with the new values, not while the next iteration runs.
    """

    __slots__ = ("exact", "indices", "is_awaited", "offset", "sent_at", "steps")

    def __init__(self, indices: range, offset: int, *, is_awaited: bool) -> None:
        self.indices = indices
        self.offset = offset
        self.is_awaited = is_awaited
        self.steps = 0  # since the values were the anchors
        self.sent_at: int | None = None  # the iteration, while it travels
        self.exact = True  # whether what comes takes the place of the values


class AnchoredTensor:
    """The anchor of one tensor.

    Args:
        keeps: whether the process has one outer gradient of it, whose memory stays.
    """

    __slots__ = ("due", "fragment", "gradient", "value", "values_are_sent")

    def __init__(self, anchor: Trained, fragment: Fragment, *, keeps: bool) -> None:
        self.value = anchor.tensor
        self.values_are_sent = anchor.statistics
        self.fragment = fragment
        self.due = False  # whether it has come, and the values are to be taken from it
        kept = keeps and not anchor.statistics
        self.gradient = torch.empty_like(anchor.tensor) if kept else None


class RoundsCarrier(Carrier):
    """Trains alone for a round, then exchanges the anchors.

    A tensor whose rule is `RuleKind.MEAN` is changed by an optimizer of the caller, between its
    `begin` and `finish`; its gradient is not used. At staleness 0 `finish` then returns with the
    new values at the end of a round. Otherwise they come while the next iteration runs, as in other
    exchanges.

    Args:
        outer: the exchange of the anchors, which this carrier closes.
        anchors: made by `anchors_of`.
        settings: common to all tensors. The limit on the gradients' norm is for this worker's own
            gradients.
        member: of the job; its options have the steps of a round, fragments, delay and mix, and the
            outer rate.
        delayed: number of workers that exchange these tensors, where the first of them adds the
            outer momentum (`DelayedMomentum`); 0: the outer rule has it.
        reads_outer: whether this worker is the first of them: it reads the outer histories for
            snapshots.
        quorum: the rounds, where a quorum of the workers ends them; None: all do.

    Attributes:
        iteration: the number of the next one, after `finish`. Where the job may continue without
            this worker, it continues from the iterations that the job has finished.
    """

    state: RoundsState

    def __init__(
        self,
        outer: Exchange,
        tensors: Sequence[Trained],
        anchors: Sequence[Trained],
        settings: ExchangeSettings,
        member: Membership,
        *,
        delayed: int = 0,
        reads_outer: bool = True,
        quorum: QuorumRounds | None = None,
    ) -> None:
        self.indices = range(len(tensors))
        self._outer = outer
        self._options = options = member.options
        self._inner = InnerWorkers(tensors, settings, count=len(member.own))
        steps, is_awaited = options.local_steps, self._inner.by_caller and not delayed
        parts = fragments_of([t.tensor.numel() for t in tensors], options.sync_fragments)
        self._fragments = [
            Fragment(indices, (n + 1) * steps // len(parts) % steps, is_awaited=is_awaited)
            for n, indices in enumerate(parts)
        ]
        of_each = (fragment for fragment in self._fragments for _ in fragment.indices)
        self._tensors = [
            AnchoredTensor(anchor, fragment, keeps=len(member.own) == 1)
            for anchor, fragment in zip(anchors, of_each, strict=True)
        ]
        self._started = False  # whether an iteration of the outer exchange has
        self._quorum = quorum
        self.iteration = settings.start_clock
        self._momentum: DelayedMomentum | None = None
        if delayed and reads_outer:
            self._momentum = DelayedMomentum(anchors, options, delayed)
        # A worker has read fragment k - m, and so has rank 0's push of it, before it ends exchange
        # k. An exchange takes at least H // P iterations. `Session.signal` reckons with m = 1.
        spacing = steps // len(parts)
        self._ends = RoundControl(outer.control, lag=-(-(options.sync_delay + 1) // spacing) - 1)
        self._ends.next_end = self._next_end()
        if quorum is not None:
            quorum.settle = self._settle_quorum
        outer_histories = outer.state.histories if reads_outer else None
        self.state = RoundsState(
            self._inner.histories,
            outer.state,
            anchors,
            member,
            outer_histories=self._momentum.histories if self._momentum else outer_histories,
            outer_arrays=2 if delayed else 1,
            barrier=None if quorum is None else lambda: outer.control.all_gather(b""),
        )

    @property
    def control(self) -> JobControl:
        """The requests of rank 0 by iterations."""
        return self._quorum or self._ends

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        """Open both exchanges.

        A tensor's history is the history of its own rule, of each virtual worker of this process,
        then the outer rule's if known.
        """
        inner, outer = self.state.split(histories)
        if clock is not None:
            self.iteration = clock
            self._ends.next_end = self._next_end()
        if self._quorum is not None:
            self._quorum.open()
        self._inner.open(inner, clock)
        for index, own in enumerate(self._tensors):
            own.value.copy_(self._inner.values(index)[0])
        self._outer.open(None if self._momentum else outer, clock)
        self._started = False
        self._take_anchors()
        if self._momentum is not None:
            self._momentum.load(outer)
        self.state.bring(self._outer.control)

    def start(self, step: Step) -> None:
        self.iteration = step.iteration
        self._inner.start(step)
        self._start_outer()

    def _start_outer(self) -> None:
        if not self._started:
            self._started = True
            self._outer.start(self._outer.finished, self._options.outer_lr)
            for own in () if self._options.streams else self._tensors:
                own.due = True

    def note_records(self, count: float) -> None:
        """See `Exchange.note_records`."""
        if self._quorum is not None:
            self._quorum.note_records(count)

    def begin(self, index: int, gradient: Tensor) -> None:
        self._inner.begin(index, gradient)

    def wait(self, index: int) -> None:
        own = self._tensors[index]
        if not own.due:
            return
        own.due = False
        self._outer.wait(index)
        for value in self._inner.values(index):
            if own.fragment.exact:
                value.copy_(own.value)
            else:
                value.lerp_(own.value, 1 - self._options.sync_mix)

    def next_virtual_worker(self) -> None:
        """Begin the turn of the next virtual worker of this process, which has values of its own."""
        self._wait_all()
        self._inner.next()

    def finish(self, limit: float) -> None:
        self._wait_all()
        self._inner.finish()
        self.iteration += 1
        if self._quorum is not None:
            self._quorum.end_iteration()
        for fragment in self._fragments:
            fragment.steps += 1
            sent_at = fragment.sent_at
            if sent_at is not None and self.iteration >= sent_at + self._options.sync_delay:
                self._arrive(fragment)
        if self._inner.by_caller:
            self._wait_all()  # what has come is not behind what leaves now
        for fragment in self._fragments:
            awaited = self._quorum is not None and self._quorum.is_awaited
            if awaited or self.iteration % self._options.local_steps == fragment.offset:
                self._end_round(fragment)

    def _end_round(self, fragment: Fragment) -> None:
        for index in fragment.indices:
            self.wait(index)
        if self._quorum is not None:
            self._meet(self._quorum, whole=False)
            return
        self._send([fragment])
        self._ends.end_round(self.iteration, self._outer.finished, next_end=self._next_end())
        if not self._options.sync_delay:
            self._arrive(fragment)
        if fragment.is_awaited and self._options.streams:
            self._wait_all()
        elif fragment.is_awaited:
            self._outer.settle()
            self._take_anchors()

    def _meet(self, quorum: QuorumRounds, *, whole: bool) -> None:
        """End a round; continue from the job's iterations once this worker's changes have counted.

        Args:
            whole: whether it waits for all workers.
        """
        quorum.describe(self.iteration, whole=whole)
        self._send(self._fragments)
        self._outer.settle()
        self.iteration = quorum.end()
        self._take_anchors()

    def _settle_quorum(self) -> None:
        assert self._quorum is not None
        moved = self._fragments[0].steps > 0
        if self._started and not moved:
            self._wait_all()
        if moved or not self._quorum.complete:
            self._start_outer()
            self._wait_all()
            self._meet(self._quorum, whole=True)

    def settle(self, clock: int) -> None:
        if self._quorum is not None:
            self._settle_quorum()
            return
        for fragment in self._fragments:
            if fragment.sent_at is not None:
                self._arrive(fragment)
        moved = [fragment for fragment in self._fragments if fragment.steps]
        if moved:
            self._start_outer()
            self._wait_all()
            self._send(moved)
        self._outer.settle()
        self._take_anchors()
        if self._momentum is not None:
            self._momentum.settle()

    def traffic(self) -> Mapping[int, Traffic]:
        return self._outer.traffic()

    def close(self) -> None:
        self._outer.close()

    def _next_end(self) -> int:
        steps = self._options.local_steps
        return min(
            self.iteration + (f.offset - self.iteration - 1) % steps + 1 for f in self._fragments
        )

    def _wait_all(self) -> None:
        for index in self.indices:
            self.wait(index)

    def _send(self, fragments: Sequence[Fragment]) -> None:
        """Send what this worker has learned since the last exchange of these fragments, in one
        outer iteration.
        """
        for fragment in fragments:
            fragment.sent_at, fragment.steps = self.iteration, 0
        indices = [index for fragment in fragments for index in fragment.indices]
        for worker in range(self._inner.count):
            if worker:
                self._outer.next_virtual_worker()
            # first all: a thread that encodes them would slow the differences down
            ready = [one for index in indices for one in self._outer_gradient(index, worker)]
            for index, gradient in ready:
                self._outer.begin(index, gradient)
        self._outer.finish()
        self._started = False

    def _outer_gradient(self, index: int, worker: int) -> list[tuple[int, Tensor]]:
        """Return the tensor's index with its outer gradient, or with the values of statistics;
        none for `finish`.

        Args:
            worker: place of the virtual worker among this process's.
        """
        own, value = self._tensors[index], self._inner.values(index)[worker]
        if own.values_are_sent:
            if self._inner.count > 1:
                return [(index, value.clone(memory_format=torch.contiguous_format))]
            own.value.copy_(value)
            return [(index, own.value)] if self._options.streams else []
        gradient = torch.empty_like(own.value) if own.gradient is None else own.gradient
        torch.sub(own.value, value, out=gradient)
        if self._momentum is not None:
            self._momentum.add_to(gradient, index)
        return [(index, gradient)]

    def _arrive(self, fragment: Fragment) -> None:
        """Let the next use of a fragment wait for what travels."""
        fragment.sent_at = None
        fragment.exact = fragment.steps == 0 or self._options.sync_mix == 0
        if fragment.exact:
            fragment.steps = 0
        for index in fragment.indices:
            self._tensors[index].due = True

    def _take_anchors(self) -> None:
        """Set the values to the anchors, which have come."""
        for fragment in self._fragments:
            fragment.steps, fragment.sent_at = 0, None
        for own in self._tensors:
            own.due = False
        self._inner.set([own.value for own in self._tensors])


class RoundsExchange(Exchange):
    """The exchange of a `RoundsCarrier`, which has all tensors."""

    def __init__(
        self, rounds: RoundsCarrier, settings: ExchangeSettings, interruption: Interruption
    ) -> None:
        super().__init__([rounds], rounds.control, settings, interruption=interruption)
        self._rounds = rounds

    def next_virtual_worker(self) -> None:
        self._rounds.next_virtual_worker()

    def note_records(self, count: float) -> None:
        self._rounds.note_records(count)

    def finish(self) -> None:
        super().finish()
        self.finished = self._rounds.iteration
