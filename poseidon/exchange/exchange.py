"""The exchange, which keeps the replicas of a job together.

One iteration of a training loop:

    exchange.start(iteration, rate, ...)
    for each layer, bottom up:   exchange.wait(its tensors)     -> forward
    for each layer, top down:    backward -> exchange.begin(a tensor, its gradient)
                                 or exchange.begin_factors(...), backward, exchange.release(...)
    exchange.finish()

Law: after `wait(k)` in iteration t, tensor k holds every replica's updates of iterations < t - s,
s its staleness, and this replica's own. `wait` may also be called between `finish` and the next
`start`, on one replica alone: it then brings the value of the next iteration. `begin` returns at
once; the gradient is read in the background and must not be written to before the tensor's next
`wait`. A tensor that got no gradient in an iteration counts as zero. The tensors' own memory is
updated in place, so modules never see a new tensor: from `begin` (with factors: from `release`) to
the next `wait` it belongs to the exchange, which may change it at any moment.

A tensor in `by_factors` gets no gradient: `begin_factors` brings u (rows x N) and v (rows x M) of
its layer, whose product u^T v (N x M, the tensor's shape) is the gradient. They are copied before
it returns.

A process may compute for several virtual workers, one after another: between two of them comes
`next_virtual_worker`, and what `begin` and `begin_factors` bring is added (`turns.py`). The exchange
may write to a gradient that has begun. Statistics have the iteration's first values again.

Statistics are tensors that the forward pass of the module changes (BatchNorm). They have no
gradient and never `begin`. `finish` takes their values. After the next `wait` they hold the mean
over the replicas; at staleness > 0 they have moved by 1/W of each replica's change. Rates, rules,
scales and limits do not apply to them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, History
from poseidon.exchange.carrier import Carrier, Step, UnitedState, merged
from poseidon.exchange.cost import ExchangePlan
from poseidon.exchange.job_control import JobControl
from poseidon.exchange.observer import ObservedCall, ObservedCalls, Observer, Traffic
from poseidon.exchange.turns import Turns
from ps_server import Client, ServerError, StoreSpec
from ps_server.monitor import Interruption
from ps_server.rules import clip_factor


class Exchange:
    """Keeps the tensors of all replicas together. The module's docstring has the order of calls.

    Args:
        carriers: which move the tensors; each tensor has one. They are called in this order.
        control: collections among all workers, and requests of rank 0.
        turns: of the virtual workers of this process; None: it computes for one.
        interruption: may end all waits of the carriers and of `control`; None: they have none.
        all_squares: returns the exact sum of numbers over all workers that share a limit on their
            gradients' norm: this one, or all of its host.
        now_ns: the time in nanoseconds, for observers.

    Attributes:
        turns: see above.
        by_factors: indices of the tensors that come by `begin_factors`, never by `begin`.
        state: what a snapshot holds beside the tensors.
        finished: iterations finished: the number of the next one. With a quorum
            (`rounds/quorum.py`) `finish` may leave out those that the job has made without this
            worker.
    """

    def __init__(
        self,
        carriers: Sequence[Carrier],
        control: JobControl,
        settings: ExchangeSettings,
        *,
        turns: Turns | None = None,
        interruption: Interruption | None = None,
        all_squares: Callable[[Sequence[float]], float] = math.fsum,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.carriers = tuple(carriers)
        self._of = {index: carrier for carrier in carriers for index in carrier.indices}
        self.by_factors = frozenset().union(*(carrier.by_factors for carrier in carriers))
        self.control = control
        self.closed = False
        self.state = UnitedState(
            [carrier.state for carrier in carriers], lambda: self.observing(ObservedCall.HISTORIES)
        )
        self.turns = turns
        self._calls = ObservedCalls(interruption or Interruption(), now_ns)
        self._clip = settings.clip
        self._all_squares = all_squares
        self.finished = settings.start_clock
        control.start(self.finished)

    def observe(self, observers: Sequence[Observer]) -> None:
        """Notify these observers of each call from now on, in their order, in place of others."""
        self._calls.observe(observers)
        self.control.around_wait = lambda: self.observing(ObservedCall.GATHER)

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """Bring every replica to the first values of rank 0, and to its histories.

        All replicas call it together, and a second time, with `clock`, where a saved state was
        loaded into the tensors after the first time. No iteration may lie between the two.

        Args:
            histories: for each tensor the history to continue from (a resumed run); None: all
                zero. Rank 0's count; private ones (`CarrierState.private`) are each replica's own.
            clock: number of finished iterations that the tensors' values have: the iteration of the
                next `start`. None at the first call, for which `ExchangeSettings.start_clock` has
                it.
        """
        with self.observing(ObservedCall.OPEN):
            if clock is not None:
                self.finished = clock
                self.control.start(clock)
            for carrier in self.carriers:
                carrier.open(histories, clock)

    def start(self, iteration: int, *rates: float) -> None:
        """Begin an iteration. `rates` are those in it, one or more; see `Trained.rate_index`."""
        with self.observing(ObservedCall.START, iteration):
            self.finished = iteration
            step = Step(iteration, rates)
            self.control.start(iteration)
            if self.turns is not None:
                self.turns.start()
            for carrier in self.carriers:
                carrier.start(step)

    def begin(self, index: int, gradient: Tensor) -> None:
        """Send the gradient of tensor `index`, which is whole in this iteration."""
        began_ns = self._calls.begin(ObservedCall.BEGIN, index)
        try:
            if self.turns is None:
                self._of[index].begin(index, gradient)
            else:
                self._contribute(self.turns, index, gradient)
        finally:
            self._calls.end(ObservedCall.BEGIN, index, began_ns)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """Send the factors of tensor `index` in this iteration. The layer still uses the tensor."""
        began_ns = self._calls.begin(ObservedCall.BEGIN, index)
        factors: tuple[Tensor, Tensor] | None = (u_KN, v_KM)
        try:
            if self.turns is not None:
                factors = self.turns.add_factors(index, u_KN, v_KM)
            if factors is not None:
                self._of[index].begin_factors(index, *factors)
        finally:
            self._calls.end(ObservedCall.BEGIN, index, began_ns)

    def release(self, index: int) -> None:
        """Hand over tensor `index`, whose factors have begun.

        The layer does not use it any more in this iteration.
        """
        if self.turns is None or self.turns.is_last:
            self._of[index].release(index)

    def wait(self, index: int) -> None:
        """Return once tensor `index` may be used."""
        began_ns = self._calls.begin(ObservedCall.WAIT, index)
        try:
            self._of[index].wait(index)
            if self.turns is not None:
                self.turns.keep(index)
        finally:
            self._calls.end(ObservedCall.WAIT, index, began_ns)

    def next_virtual_worker(self) -> None:
        """End the turn of a virtual worker that is not this process's last one."""
        if self.turns is not None:
            self._end_turn(self.turns)
            self.turns.next()

    def _end_turn(self, turns: Turns) -> None:
        for index, value in turns.missing(self.by_factors):
            self._contribute(turns, index, value)

    def _contribute(self, turns: Turns, index: int, gradient: Tensor) -> None:
        total = turns.add(index, gradient)
        if total is not None:
            self._of[index].begin(index, total)

    def finish(self) -> None:
        """End the iteration. A tensor that has not begun has a gradient of zero."""
        with self.observing(ObservedCall.FINISH):
            if self.turns is not None:
                self._end_turn(self.turns)
                for index, factors in self.turns.rest_of_factors():
                    self._of[index].begin_factors(index, *factors)
            limit = 1.0
            if self._clip is not None:
                held = [square for c in self.carriers for square in c.held_squares()]
                limit = clip_factor(self._all_squares(held), self._clip)
            for carrier in self.carriers:
                carrier.finish(limit)
            self.control.finish(self.finished)
            self.finished += 1

    def note_records(self, count: float) -> None:
        """Note that this worker computes so many records in the next iteration, or so many more.

        With a quorum they weigh its changes. An iteration without a note counts as one record.
        """

    def settle(self) -> None:
        """Bring every tensor to the state after all replicas' finished iterations.

        All replicas call it together, after the same number of iterations.
        """
        with self.observing(ObservedCall.SETTLE):
            for carrier in self.carriers:
                carrier.settle(self.finished)

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic of the tensors so far, where it is counted.

        Any thread may call this.
        """
        return merged(carrier.traffic() for carrier in self.carriers)

    def interrupt(self, error: ServerError) -> None:
        """End every wait, now and later, with an error: of this exchange, and of its `control`.

        Any thread may call it at any moment; later calls do nothing. `close` then drops what is
        queued and does not say goodbye: the other replicas lose this one.
        """
        self._calls.interruption.interrupt(error)

    def close(self) -> None:
        """Leave. A second call does nothing. Nothing is written to the tensors afterwards."""
        self.closed = True
        with self.observing(ObservedCall.CLOSE):
            for carrier in self.carriers:
                carrier.close()

    def observing(self, call: ObservedCall, index: int = -1) -> AbstractContextManager[None]:
        """Notify the observers of a call, which is the body."""
        return self._calls.around(call, index)


Connect = Callable[[str], Sequence[str]]
"""Reports the address at which this worker listens for the others, unless it is empty; waits for
the addresses of the job and returns them: of the shards in their order, or where there are none of
all workers, by rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An exchange that is not yet opened, with its parts.

    Attributes:
        store: the store that workers and shards agree on; None without shards.
        tables: for each table of the store the indices of its tensors.
        encoded: indices of the tensors whose gradients lose bits on the way to the shards.
        client: this worker's connection to the shards; None without shards.
        recorded: whether later starts and resumed runs need the same plan (`--exchange=auto`, `hybrid`).
    """

    exchange: Exchange
    plan: ExchangePlan
    store: StoreSpec | None = None
    tables: Sequence[Sequence[int]] = ()
    encoded: frozenset[int] = frozenset()
    client: Client | None = None
    recorded: bool = False
