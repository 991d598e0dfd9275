"""What the training loops of elastic jobs have in common: when memory snapshots are due, and how a
loop ends where the job regroups.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence

from ps_server import ServerError

COST = 0.02
"""The part of the training time that memory snapshots may take."""
FIRST = 5
"""Iterations from the start of training to the first snapshot whose cost counts."""
NEW = 0.25
"""The weight of the last snapshot in the mean cost."""
LEAST, MOST = 2, 10_000
"""The fewest and the most iterations between two snapshots."""
COSTS = struct.Struct("<dd")
"""The form in which a worker sends its `SnapshotInterval.costs`."""


class Regrouped(BaseException):
    """All workers pause after the same iteration, with a memory snapshot of it.

    A script that catches every `Exception` does not catch it.
    """


class StartEnded(BaseException):
    """The waits of this start were ended by an error, and the script has gone on after it.

    A script that catches every `Exception` does not catch it.
    """

    def __init__(self, error: ServerError) -> None:
        super().__init__(str(error))
        self.error = error


class SnapshotInterval:
    """Chooses when memory snapshots are due. Pure: all workers give it the same costs.

    Args:
        start: iterations finished at the start, when the first one is taken.
        every: iterations from one to the next; 0: so many that they cost at most `COST`.
        steps: iterations of a round of local steps: one is due where a round ends; 1: none.
    """

    def __init__(self, start: int, every: int, *, steps: int = 1) -> None:
        self._every = every
        self._steps = steps
        self._begun_at = start
        self._due = start
        self._blocked_s = 0.0
        self._cost_s: float | None = None
        self._usual: list[float] = []
        self._during: list[float] = []
        self.is_decided = True
        """Whether the next one has its iteration."""

    def is_due(self, iteration: int) -> bool:
        """Return whether one is due when so many iterations are finished, or was due before."""
        return self.is_decided and iteration >= self._due and iteration % self._steps == 0

    def left(self, iteration: int) -> int:
        """Return how many iterations after so many finished ones the next is due."""
        return max(0, self._due - iteration)

    def costs(self) -> tuple[float, float]:
        """Return the mean seconds that a snapshot costs this worker, and the mean seconds of an
        iteration; 0 before they are known.
        """
        if not self._usual:
            return 0.0, 0.0
        usual_s = statistics.mean(self._usual)
        last_s = self._blocked_s + sum(self._during) - usual_s * len(self._during)
        known_s = last_s if self._cost_s is None else self._cost_s
        return max(0.0, known_s + NEW * (last_s - known_s)), usual_s

    def begun(self, iteration: int, blocked_s: float) -> None:
        """Note a snapshot.

        Args:
            blocked_s: seconds for which training has waited for it.
        """
        if self._usual:
            self._cost_s = self.costs()[0]
        self._begun_at, self._blocked_s = iteration, blocked_s
        self._usual.clear()
        self._during.clear()
        self.is_decided = False

    def note(self, seconds: float, *, transferring: bool) -> None:
        """Note the time of an iteration, and whether parts of a snapshot came in it."""
        (self._during if transferring else self._usual).append(seconds)

    def decide(self, costs: Sequence[tuple[float, float]]) -> None:
        """Choose when the next one is due.

        Args:
            costs: `costs` of each worker when it began the last one.
        """
        self.is_decided = True
        if self._every:
            self._due = self._begun_at + self._every
            return
        known = [(cost_s, iteration_s) for cost_s, iteration_s in costs if iteration_s > 0]
        if len(known) < len(costs):
            self._due = self._begun_at + FIRST
            return
        cost_s, iteration_s = (sum(seconds) for seconds in zip(*known, strict=True))
        share = cost_s / iteration_s  # all iterate together, so single times differ by chance
        self._due = self._begun_at + min(max(LEAST, math.ceil(share / COST)), MOST)
