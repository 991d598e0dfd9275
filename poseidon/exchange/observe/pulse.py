"""Whether a worker's loop moves, waits for others, or hangs; and how much of its time is its own.

Law: the loop touches the pulse at every tensor and every batch, at the price of a look at a clock; a thread that shows life
reads it. What waits for others is no hang: who is waited for is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from poseidon.exchange.base import Ask, Exchange, History
from poseidon.exchange.observe.forwarding import ForwardingExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A look at a pulse.

    Attributes:
        still_s: since the loop last moved; 0 while it waits for others.
        waiting: whether it waits for others.
        waited_s: seconds spent waiting for others, all told.
    """

    still_s: float
    waiting: bool
    waited_s: float


class Pulse:
    """Of one loop. Until `start` it reads as if the loop had just moved.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._moved_s: float | None = None
        self._waiting_since_s: float | None = None
        self._waited_s = 0.0

    def start(self) -> None:
        """From now on, a loop that does not move hangs."""
        self._moved_s = self._now()

    def stop(self) -> None:
        """The loop is done."""
        self._moved_s = None

    def beat(self) -> None:
        """The loop has moved."""
        if self._moved_s is not None:
            self._moved_s = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop waits for others; may be entered within itself."""
        if self._waiting_since_s is not None:
            yield
            return
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """`waiting` for the innermost loop, where a context would cost more than the wait. Not within another."""
        self._waiting_since_s = self._now()

    def end_wait(self) -> None:
        """What `begin_wait` began has ended."""
        now = self._now()
        assert self._waiting_since_s is not None
        self._waited_s += now - self._waiting_since_s
        self._waiting_since_s = None
        if self._moved_s is not None:
            self._moved_s = now

    def read(self) -> Reading:
        """Look at it. Any thread may."""
        moved_s, since_s = self._moved_s, self._waiting_since_s
        waiting = since_s is not None
        still_s = 0.0 if moved_s is None or waiting else max(0.0, self._now() - moved_s)
        waited_s = self._waited_s + (self._now() - since_s if since_s is not None else 0.0)
        return Reading(still_s=still_s, waiting=waiting, waited_s=waited_s)


class PulsingExchange(ForwardingExchange):
    """An exchange that tells a pulse when it moves and when it waits. See `Exchange`.

    Args:
        inner: gets every call.
        pulse: of the loop that makes the calls.
    """

    def __init__(self, inner: Exchange, pulse: Pulse) -> None:
        super().__init__(inner)
        self._pulse = pulse

    def open(self, histories: Sequence[History] | None) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.open(histories)

    def reopen(self, histories: Sequence[History] | None, clock: int) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.reopen(histories, clock)

    def start(self, iteration: int, rate: float) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.start(iteration, rate)

    def begin(self, index: int, gradient: Tensor) -> None:
        """See `Exchange`."""
        self._pulse.beat()
        self._inner.begin(index, gradient)

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        """See `Exchange`."""
        self._pulse.beat()
        self._inner.begin_factors(index, u_KN, v_KM)

    def wait(self, index: int) -> None:
        """See `Exchange`."""
        self._pulse.begin_wait()
        try:
            self._inner.wait(index)
        finally:
            self._pulse.end_wait()

    def finish(self) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.finish()

    def settle(self) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.settle()

    def histories(self) -> list[History]:
        """See `Exchange`."""
        with self._pulse.waiting():
            return self._inner.histories()

    def gathered(self, ask: Ask) -> tuple[bytes, ...]:
        """See `Exchange`."""
        with self._pulse.waiting():
            return self._inner.gathered(ask)

    def close(self) -> None:
        """See `Exchange`."""
        with self._pulse.waiting():
            self._inner.close()
