"""Snapshots in memory: the states from which an elastic job continues when it has lost a worker; when
they are due; and how a loop ends where the job regroups.

Laws:
* A memory snapshot is the state after one iteration that all workers have finished, as on disk. A job
  that continues from it has the bits of an undisturbed one.
* The first worker of each of the first hosts holds it, so one of them can start all others. A snapshot
  counts once all of it has arrived; until then the one before it does.
* Where the workers of a host divide a module, each of them holds its part. A part counts once all
  workers of the job have made theirs. So when one worker counts a snapshot, all others have it.
* A solver trains on while the parts arrive (`kept_state.py`). A script takes its snapshot, the content
  of a checkpoint (`Group.save`), at once: where the loop asks the loader of the job's first group for
  the first batch of an iteration, and where a solver of pycaffe begins one. All that belongs to the
  iteration before is done there. A script has snapshots once its first group has called `resume`, so
  that a script which starts again finds its place.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from poseidon.engine.kept_state import KeptState, StateCopy
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


class EndOfStart(BaseException):
    """Ends the user's code in a start without an error of its own; is not an `Exception`."""


class StopRequested(KeyboardInterrupt):
    """The job was asked to stop. All workers raise it after the same step."""


def is_failure(error: BaseException | None) -> bool:
    """Return whether the user's code has ended with an error of its own.

    It need not be an `Exception`: a panic of a library in Rust is not.
    """
    return error is not None and not isinstance(error, EndOfStart | StopRequested)


class Regrouped(EndOfStart):
    """All workers pause after the same iteration, with a memory snapshot of it."""


class StartEnded(EndOfStart):
    """The waits of this start were ended by an error, and the script has continued after it."""

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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """A complete snapshot: its content is that of a checkpoint, or a `KeptState`.

    Attributes:
        is_part: whether it is this worker's part, of a module that is divided.
    """

    iteration: int
    content: T
    is_part: bool = False


class Memory(Generic[T]):
    """The memory snapshots of one worker, for one start of its job.

    Args:
        holds: whether this worker keeps snapshots; of whole modules, if it is a script's.
        start: iterations finished at the start.
        every: iterations from one snapshot to the next; 0: they are chosen.
        steps: iterations of a round of local steps; 1: none.
        newest: of the start before; None: there is none.
        rewinds: whether this start continues from rank 0's.

    Attributes:
        newest: the newest complete one that this worker has, and that counts.
    """

    def __init__(
        self,
        *,
        holds: bool,
        start: int,
        every: int,
        newest: Snapshot[T] | None,
        rewinds: bool,
        steps: int = 1,
    ) -> None:
        self.holds = holds
        self.newest = newest
        self.rewinds = rewinds
        self._interval = SnapshotInterval(start, every, steps=steps)

    def is_due(self, iteration: int) -> bool:
        """Return whether all workers take a snapshot when so many iterations are finished."""
        return self._interval.is_due(iteration)

    def _decide(self, notes: Sequence[bytes]) -> None:
        self._interval.decide([COSTS.unpack(note) for note in notes])


class SolverMemory(Memory[KeptState]):
    """The memory snapshots of a solver's worker, which trains on while they arrive."""

    _coming: StateCopy | None = None
    _begun_at = 0
    _old: KeptState | None = None

    def begin(self, iteration: int, copy: Callable[[bytes, KeptState | None], StateCopy]) -> None:
        """Begin a snapshot. Every worker calls it after the same iteration.

        Args:
            copy: begins to copy the state, with a note for all workers. It may write to an older
                state.
        """
        self.finish()
        began_s = time.perf_counter()
        old, self._old = self._old, None
        self._coming = copy(COSTS.pack(*self._interval.costs()), old)
        self._begun_at = iteration
        self._interval.begun(iteration, time.perf_counter() - began_s)

    def follow(self, seconds: float) -> None:
        """Take what has come of a snapshot; all workers call it after each iteration.

        Args:
            seconds: that the iteration took.
        """
        coming = self._coming
        self._interval.note(seconds, transferring=coming is not None)
        if coming is not None:
            self._spread(coming)  # its notes: sent before an iteration that all have finished
            coming.send()
            self._complete(coming.poll())

    def finish(self) -> None:
        """Wait until the snapshot that has begun, if any, is complete."""
        if self._coming is not None:
            self._spread(self._coming)
            self._complete(self._coming.result())

    def _spread(self, coming: StateCopy) -> None:
        if not self._interval.is_decided:
            self._decide(coming.notes())
            coming.spread(self._interval.left(self._begun_at))

    def _complete(self, state: KeptState | None) -> None:
        if state is not None:
            self._old = None if self.newest is None else self.newest.content
            self.newest = Snapshot(self._begun_at, state)
            self._coming = None


class ScriptMemory(Memory[bytes]):
    """The memory snapshots of a script's worker.

    Args:
        holds_part: whether this worker keeps its part of a module that is divided.
        rewind: the iteration from which this start continues; -1: none.
        on_begin: called where the loop begins an iteration.

    Attributes:
        resumes: whether the script has called `resume`.
    """

    def __init__(
        self,
        *,
        holds: bool,
        rewind: int,
        every: int,
        newest: Snapshot[bytes] | None,
        holds_part: bool = False,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        start = max(rewind, 0)
        super().__init__(holds=holds, start=start, every=every, newest=newest, rewinds=rewind >= 0)
        self.resumes = False
        self._holds_part = holds_part
        self._made: Snapshot[bytes] | None = None
        """The last one that this worker has made of its part, which may not count yet."""
        self._on_begin = on_begin
        self._iteration = start
        self._since_s = time.perf_counter()

    def resume(self) -> bool:
        """Note that the script has called `resume`. Return whether this start continues from
        rank 0's snapshot.
        """
        self.resumes = True
        return self.rewinds

    def at(self, iteration: int) -> Snapshot[bytes] | None:
        """Return the snapshot of an iteration that this worker has; None: it has none."""
        found = (one for one in (self.newest, self._made) if one and one.iteration == iteration)
        return next(found, None)

    @property
    def content(self) -> bytes | None:
        """The content of this worker's snapshot; None: it has none."""
        return None if self.newest is None else self.newest.content

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
        content: Callable[[bool], bytes],
        gather: Callable[[bytes], Sequence[bytes]],
        *,
        regroups: bool,
        is_part: bool = False,
    ) -> None:
        """Take a snapshot if one is due, between two iterations. All workers call it together.

        Args:
            content: makes the content, with all others, from whether this worker keeps it.
            regroups: whether the launcher has requested that the job regroups here.
            is_part: whether the content is of this worker's part.

        Raises:
            Regrouped: after a snapshot, if it has.
        """
        if regroups or self.is_due(self._iteration):
            began_s = time.perf_counter()
            keeps = self._holds_part if is_part else self.holds
            notes, made = gather(COSTS.pack(*self._interval.costs())), content(keeps)
            self._made = Snapshot(self._iteration, made, is_part) if keeps else None
            if is_part:
                gather(b"")
            self.newest = self._made
            self._since_s = time.perf_counter()
            self._interval.begun(self._iteration, self._since_s - began_s)
            self._decide(notes)
            self._on_begin()
        if regroups:
            raise Regrouped
