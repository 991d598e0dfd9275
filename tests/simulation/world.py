"""Simulated time, and the deviations of one run from an undisturbed one.

Laws:

* A run is a function of its seed, its scenario and the deviations that are switched off: no clock,
  no thread, no socket, no order of a hash table.
* Each deviation (a late frame, a slow step, a kill) has a key. It is drawn from a stream of its own
  place, so that switching one off leaves the draws of the others as they are.
* A run that breaks a law of the protocol raises `Violation`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any, Protocol


class Violation(AssertionError):
    """A law of the protocol does not hold."""


class Blocking(Protocol):
    """A thread that blocks; see `BatonThread`."""

    process: Any
    error: BaseException | None

    def wait(self, question: Callable[[], object], timeout_s: float) -> bool:
        """See `BatonThread`."""

    def close(self) -> None:
        """See `BatonThread`."""


class World:
    """One run.

    Args:
        seed: of all draws.
        only: keys of the deviations that may happen; None: all.

    Attributes:
        now: seconds since the beginning.
        deviations: the keys of those that have happened, in order.
        lost_s: when something was lost for good; -1: nothing was.
        lossy: whether something was lost for good, so that processes may end with an error.
        events: how many there were.
        open_tasks: tasks of processes that have not ended.
        threads: that block, of all processes.
        running: the one that runs; None: the events do.
    """

    def __init__(self, seed: int, *, only: frozenset[str] | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        self.deviations: list[str] = []
        self.lossy = False
        self.lost_s = -1.0
        self.threads: list[Blocking] = []
        self.running: Blocking | None = None
        self._only = only
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = self.events = self.open_tasks = 0
        self.vary("faults")

    def vary(self, name: str) -> None:
        """Draw how often frames are late and steps are slow."""
        faults = self.stream(name)
        self.late_p = faults.choice((0.0, 0.1, 0.3, 0.6))
        self.late_s = faults.choice((0.001, 0.02, 0.4))
        self.slow_p = faults.choice((0.0, 0.02, 0.2))
        self.slow_s = faults.choice((0.001, 0.05, 1.0))

    def stream(self, name: str) -> Random:
        """Return the random numbers of one place of this run."""
        return Random(f"{self.seed} {name}")

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def deviates(self, key: str) -> bool:
        """Note a deviation; return whether it happens."""
        if self._only is not None and key not in self._only:
            return False
        self.deviations.append(key)
        return True

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something at a moment; events of one moment keep their order."""
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something later."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, call, arguments))

    def run(self, ended: Callable[[], object], most_s: float) -> bool:
        """Let time pass until something has ended, for `most_s` seconds at most; return whether
        it has.
        """
        until_s = self.now + most_s
        events = self._events
        while not ended():
            if not events or events[0][0] > until_s:
                self.now = until_s
                return False
            self.now, _, call, arguments = heapq.heappop(events)
            self.events += 1
            call(*arguments)
        return True
