"""Clocks and the staleness bound.

Law (stale synchronous parallel, Ho et al., NIPS 2013): a worker that has finished c iterations may
read a table of staleness s only when the value has every update of all workers' first c - s
iterations. In terms of clocks: the slowest worker has finished at least c - s. So s = 0 is
bulk-synchronous, and a worker can be at most s + 1 finished iterations ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable

from ps_server.errors import LocalProtocolError, RemoteProtocolError


def needed_clock(clock: int, staleness: int) -> int:
    """Return the clock that a value must have reached before a worker at `clock` may read it."""
    return clock - staleness


class VectorClock:
    """The number of iterations that each worker has finished.

    Args:
        workers: their ranks.
        start: iterations that each has finished.
    """

    __slots__ = ("_clocks",)

    def __init__(self, workers: Iterable[int], start: int = 0) -> None:
        self._clocks = dict.fromkeys(workers, start)
        if not self._clocks:
            raise LocalProtocolError("a vector clock needs at least one worker")

    @property
    def slowest(self) -> int:
        """The number of iterations that every worker has finished."""
        return min(self._clocks.values())

    def tick(self, worker: int, clock: int) -> bool:
        """Note that a worker has finished `clock` iterations, one more than before.

        Returns:
            Whether the slowest clock moved.

        Raises:
            RemoteProtocolError: the clock repeats or skips; nothing is changed.
        """
        if clock != self._clocks[worker] + 1:
            raise RemoteProtocolError(
                f"worker {worker} sent clock {clock}; expected {self._clocks[worker] + 1}"
            )
        before = self.slowest
        self._clocks[worker] = clock
        return self.slowest > before
