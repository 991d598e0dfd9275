"""The watchdog of a worker's loop: whether it makes progress, waits for other workers, or hangs.

The loop reports progress at every tensor and every batch, which costs a look at a clock. The thread
that sends heartbeats reads the watchdog. A loop that waits for other workers does not hang: the
worker that it waits for may.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from poseidon.exchange.observer import ObservedCall, Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a watchdog shows.

    Attributes:
        still_s: seconds since the loop last made progress; 0 while it waits for other workers.
        waiting: whether it waits for other workers.
        waited_s: seconds spent in such waits so far.
    """

    still_s: float
    waiting: bool
    waited_s: float


class Watchdog(Observer):
    """Watches one loop. Until `start` it reads as if the loop had just made progress.

    As an observer of the loop's exchange it takes a gradient that begins as progress, and every
    other call as a wait.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress_s: float | None = None
        self._waiting_since_s: float | None = None
        self._depth = 0
        self._waited_s = 0.0

    def start(self) -> None:
        """Begin to watch: from now on a loop that makes no progress hangs."""
        self._progress_s = self._now()

    def stop(self) -> None:
        """Stop watching: the loop has ended."""
        self._progress_s = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch inside the block: the loop stands still on purpose."""
        is_watched, self._progress_s = self._progress_s is not None, None
        try:
            yield
        finally:
            if is_watched:
                self.start()

    def progress(self) -> None:
        """Note that the loop makes progress."""
        if self._progress_s is not None:
            self._progress_s = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the loop waits for other workers. It may be entered within itself."""
        self._begin_wait()
        try:
            yield
        finally:
            self._end_wait()

    def before(self, call: ObservedCall, index: int) -> None:
        if call is ObservedCall.BEGIN:
            self.progress()
        else:
            self._begin_wait()

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        if call is not ObservedCall.BEGIN:
            self._end_wait()

    def _begin_wait(self) -> None:
        if self._depth == 0:
            self._waiting_since_s = self._now()
        self._depth += 1

    def _end_wait(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        now = self._now()
        assert self._waiting_since_s is not None
        self._waited_s += now - self._waiting_since_s
        self._waiting_since_s = None
        if self._progress_s is not None:
            self._progress_s = now

    def read(self) -> Reading:
        """Return what it shows now. Any thread may call this."""
        progress_s, since_s = self._progress_s, self._waiting_since_s
        waiting = since_s is not None
        still_s = 0.0 if progress_s is None or waiting else max(0.0, self._now() - progress_s)
        waited_s = self._waited_s + (self._now() - since_s if since_s is not None else 0.0)
        return Reading(still_s=still_s, waiting=waiting, waited_s=waited_s)
