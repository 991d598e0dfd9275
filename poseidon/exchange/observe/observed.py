"""One wrapper around an exchange, which notifies a list of observers of each call.

Law: observers look on. Training with them has the bits of training without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum

from torch import Tensor

from poseidon.exchange.base import Array, Exchange, ExchangeState, History
from poseidon.exchange.control import JobControl


class Call(Enum):
    """A call that observers are notified of."""

    OPEN = "open"
    START = "start"
    BEGIN = "begin"
    """`begin` or `begin_factors`: it returns at once. All others may wait for other workers."""
    WAIT = "wait"
    FINISH = "finish"
    SETTLE = "settle"
    HISTORIES = "histories"
    GATHER = "gather"
    """A wait for a collection."""
    CLOSE = "close"


class Observer:
    """Is notified before and after each call. Both methods do nothing unless they are overridden."""

    def before(self, call: Call, index: int) -> None:
        """Note that a call begins.

        Args:
            call: which one.
            index: of the tensor (BEGIN, WAIT); of the iteration (START); else -1.
        """

    def after(self, call: Call, index: int, began_ns: int, ended_ns: int) -> None:
        """Note that a call has ended, with a result or an error.

        Args:
            call: which one.
            index: as for `before`.
            began_ns: when it began, by `time.perf_counter_ns`.
            ended_ns: when it ended.
        """


class ObservedExchange:
    """See `Exchange`.

    Args:
        inner: gets every call.
        observers: notified in this order.
        now_ns: the time in nanoseconds.
    """

    def __init__(
        self,
        inner: Exchange,
        observers: Sequence[Observer],
        *,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._inner = inner
        self._now_ns = now_ns
        self._before = [o.before for o in observers if type(o).before is not Observer.before]
        self._after = [o.after for o in observers if type(o).after is not Observer.after]
        self.by_factors = inner.by_factors
        self.control: JobControl = inner.control.observed(lambda: self._observing(Call.GATHER))
        self.state: ExchangeState = _ObservedState(inner.state, lambda: self._observing(Call.HISTORIES))

    def open(self, histories: Sequence[History] | None, clock: int | None = None) -> None:
        """See `Exchange`."""
        with self._observing(Call.OPEN):
            self._inner.open(histories, clock)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        with self._observing(Call.START, iteration):
            self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        began_ns = self._begin(Call.BEGIN, index)
        try:
            self._inner.begin(index, gradient)
        finally:
            self._end(Call.BEGIN, index, began_ns)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        began_ns = self._begin(Call.BEGIN, index)
        try:
            self._inner.begin_factors(index, u_KN, v_KM)
        finally:
            self._end(Call.BEGIN, index, began_ns)

    def release(self, index: int) -> None:
        """See `Exchange`."""
        self._inner.release(index)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        began_ns = self._begin(Call.WAIT, index)
        try:
            self._inner.wait(index)
        finally:
            self._end(Call.WAIT, index, began_ns)

    def finish(self) -> None:
        """See `Exchange`."""
        with self._observing(Call.FINISH):
            self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        with self._observing(Call.SETTLE):
            self._inner.settle()

    def close(self) -> None:
        """See `Exchange`."""
        with self._observing(Call.CLOSE):
            self._inner.close()

    @contextmanager
    def _observing(self, call: Call, index: int = -1) -> Iterator[None]:
        began_ns = self._begin(call, index)
        try:
            yield
        finally:
            self._end(call, index, began_ns)

    # Called for each tensor of each iteration, where a context manager would cost more than the observers.

    def _begin(self, call: Call, index: int) -> int:
        for before in self._before:
            before(call, index)
        return self._now_ns()

    def _end(self, call: Call, index: int, began_ns: int) -> None:
        ended_ns = self._now_ns()
        for after in self._after:
            after(call, index, began_ns, ended_ns)


class _ObservedState:
    """See `ExchangeState`."""

    def __init__(self, inner: ExchangeState, observing: Callable[[], AbstractContextManager[None]]) -> None:
        self._inner = inner
        self._observing = observing
        self.private = inner.private

    def histories(self) -> list[History]:
        """See `ExchangeState`."""
        with self._observing():
            return self._inner.histories()

    def replicated(self) -> Mapping[str, Tensor]:
        """See `ExchangeState`."""
        return self._inner.replicated()

    def held_back(self) -> Mapping[str, Array]:
        """See `ExchangeState`."""
        with self._observing():
            return self._inner.held_back()

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        """See `ExchangeState`."""
        self._inner.hold_back(held_back)
