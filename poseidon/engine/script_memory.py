"""The memory snapshots of a script: the states from which an elastic job continues.

A snapshot is the content of a checkpoint (`Group.save`), in the memory of the first worker of each
of the first hosts. It is taken where the loop asks the loader of the job's first group for the
first batch of an iteration, and where a solver of pycaffe begins one: all that belongs to the
iteration before is done there.

Law: a script has snapshots once its first group has called `resume`, so that a script which starts
again finds its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.engine.elastic import COSTS, Regrouped, SnapshotInterval


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot.

    Attributes:
        content: of a checkpoint.
    """

    iteration: int
    content: bytes


class ScriptMemory:
    """The memory snapshots of one worker, for one start of its job.

    Args:
        holds: whether this worker keeps snapshots.
        rewind: the iteration from which this start continues; -1: none.
        every: iterations from one snapshot to the next; 0: they are chosen.
        newest: of the start before; None: there is none.
        on_begin: called where the loop begins an iteration.

    Attributes:
        newest: the newest snapshot that this worker has.
        resumes: whether the script has called `resume`.
    """

    def __init__(
        self,
        *,
        holds: bool,
        rewind: int,
        every: int,
        newest: Snapshot | None,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.holds = holds
        self.newest = newest
        self.resumes = False
        self.rewinds = rewind >= 0
        self._on_begin = on_begin
        self._interval = SnapshotInterval(max(rewind, 0), every)
        self._iteration = max(rewind, 0)
        self._since_s = time.perf_counter()

    def enters(self, iteration: int) -> bool:
        """Return whether the loop has come to the beginning of an iteration; called with as many
        iterations finished as the group counts, also by loops that do not train.
        """
        if not self.resumes:
            return False
        self._on_begin()
        if iteration <= self._iteration:
            return False
        now = time.perf_counter()
        if iteration == self._iteration + 1:
            self._interval.note(now - self._since_s, transferring=False)
        self._iteration, self._since_s = iteration, now
        return True

    def between(
        self,
        content: Callable[[], bytes],
        gather: Callable[[bytes], Sequence[bytes]],
        *,
        regroups: bool,
    ) -> None:
        """Take a snapshot if one is due, between two iterations. All workers call it together.

        Args:
            regroups: whether the launcher has requested that the job regroups here.

        Raises:
            Regrouped: after a snapshot, if it has.
        """
        if regroups or self.is_due():
            self.take(content, gather)
        if regroups:
            raise Regrouped

    def is_due(self) -> bool:
        """Return whether all workers take a snapshot here."""
        return self._interval.is_due(self._iteration)

    def take(
        self, content: Callable[[], bytes], gather: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        """Take a snapshot. All workers call it together.

        Args:
            content: makes the content, with all others; what it returns counts on those that hold
                snapshots.
        """
        began_s = time.perf_counter()
        costs = [COSTS.unpack(part) for part in gather(COSTS.pack(*self._interval.costs()))]
        made = content()
        if self.holds:
            self.newest = Snapshot(self._iteration, made)
        self._since_s = time.perf_counter()
        self._interval.begun(self._iteration, self._since_s - began_s)
        self._interval.decide(costs)
        self._on_begin()
