"""The balance of a job: which process computes for how many virtual workers, by measured times.

Law: pure. A decision follows from the times of all processes and the iteration alone, so all
processes decide alike. A balance decides where virtual workers are computed, never what they
compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ps_server.protocol.virtual_workers import VirtualWorkers

WARM_UP = 1
"""Iterations at the start, and after a move, that do not count: caches and readers fill."""
FIRST = 4
"""Iterations of the first measurement."""
LEAST = 20
"""The fewest iterations of each later measurement."""
LEAST_S = 2.0
"""A later measurement lasts at least so long: a host's quota of processor has periods of 0.1 s."""
GAIN = 0.1
"""The part of an iteration's time that a move has to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The mean times of an iteration of one process, in seconds.

    Attributes:
        own_s: without waits for other processes.
        whole_s: with them.
    """

    own_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A decision to place the virtual workers anew.

    Attributes:
        placed: where they are from now on.
        reason: the times that it follows from, a clause.
    """

    placed: VirtualWorkers
    reason: str


class Balancer:
    """Decides at which iterations times are compared, and what follows from them.

    Args:
        placed: the virtual workers at the start.
        start: iterations finished then.
    """

    def __init__(self, placed: VirtualWorkers, start: int) -> None:
        self._placed = placed
        self._from = start + WARM_UP
        self._due = self._from + FIRST

    def counts(self, iteration: int) -> bool:
        """Return whether the time of an iteration counts: `iteration` are finished before it."""
        return self._from <= iteration < self._due

    def is_due(self, iteration: int) -> bool:
        """Return whether the measurement ends when so many iterations are finished."""
        return iteration == self._due

    def decide(self, iteration: int, times: Sequence[Times]) -> Move | None:
        """Begin the next measurement. Return the move that comes before it, if any.

        Args:
            iteration: iterations finished.
            times: of the last measurement, by process.
        """
        whole_s = max(one.whole_s for one in times)
        move = self._move(times, whole_s)
        if move is not None:
            self._placed = move.placed
        self._from = iteration + (WARM_UP if move else 0)
        self._due = self._from + max(LEAST, math.ceil(LEAST_S / max(whole_s, 1e-6)))
        return move

    def _move(self, times: Sequence[Times], whole_s: float) -> Move | None:
        processes = range(self._placed.processes)
        numbers = [len(self._placed.of(process)) for process in processes]
        each_s = [max(one.own_s, 1e-9) / n for one, n in zip(times, numbers, strict=True)]
        placed = VirtualWorkers.spread(self._placed.count, [1 / seconds for seconds in each_s])
        now_s = max(one.own_s for one in times)
        then_s = max(
            len(placed.of(process)) * seconds
            for process, seconds in zip(processes, each_s, strict=True)
        )
        if now_s - then_s < GAIN * whole_s:
            return None
        shown = ", ".join(f"{seconds:.3g}" for seconds in each_s)
        expected_s = whole_s - now_s + then_s
        reason = (
            f"one takes {shown} s on each worker, and an iteration then about {expected_s:.3g} s "
            f"instead of {whole_s:.3g} s"
        )
        return Move(placed=placed, reason=reason)
