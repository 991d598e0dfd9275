"""Restarts of a job that has lost a process or a host.

Where processes outlive the loss of others (an elastic job), the next start continues with them and
from a snapshot in their memory, at once; it does not count as a restart. All else is for jobs that
are not elastic, and for a loss that took all memory snapshots with it.

Law: only a loss is a reason (`JobInterrupted`); a mistake, a full disk or a stop by the user ends
the job. Every restart continues from the newest complete snapshot that this job itself has written,
or else from where the job began; at staleness 0 it ends with the bits of a job that was never
interrupted.

A start that fails because a host is not back yet is tried again, less and less often, for
`return_timeout_s` from its first failure on, attempts included; only a loss while the job ran
counts as a restart. Where all hosts read the same data, the job then continues without those that
are still missing. Where it can, it keeps its virtual workers and so its bits; else the records are
divided among fewer workers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from poseidon.cluster.supervision.state import RETURN_TIMEOUT_S, JobResult, Outcome
from poseidon.errors import JobError, JobInterrupted, counted

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
MOST_IN_VAIN = 10
"""Starts in a row from the same snapshot in memory, before the job is restarted from disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """The snapshot that a start continues from.

    Attributes:
        state: the solver state; empty: where the job began, or a snapshot in memory.
        iteration: iterations finished there.
        memory: whether it is in the memory of worker 0.
        is_scripts: whether the script loads a checkpoint of its own, of which nothing is known.
    """

    state: str = ""
    iteration: int = 0
    memory: bool = False
    is_scripts: bool = False

    @property
    def beginning(self) -> str:
        """Where a start without a snapshot continues, a phrase."""
        own = "from the script's own checkpoint, or " if self.is_scripts else ""
        return f"{own}from the beginning"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartedJob:
    """The result of a job that ended without an error.

    Attributes:
        result: of its last start.
        restarts: their number.
        memory_starts: how often it continued from memory after a loss.
        repeated: iterations that were lost and computed again, as far as they were reported to the
            launcher.
    """

    result: JobResult
    restarts: int
    repeated: int
    memory_starts: int = 0


class RestartDriver(Protocol):
    """The operations that restarts need."""

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        """Run the job to its end; `attempt` counts from 0.

        Raises:
            JobInterrupted: something was lost.
            JobError: it failed for another reason.
        """

    def memory_point(self) -> tuple[StartingPoint, str] | None:
        """Return the newest snapshot in the memory of processes that have paused, and a phrase
        about the hosts that the next start has; None: there is none, or too few workers are left.
        """

    def how_to_restart(self) -> str:
        """Return what the user can do for a job without restarts to continue after a loss, a
        clause; empty: she has asked for none.
        """

    def from_disk_because(self) -> str:
        """Return why a restart does not continue from memory; empty: it is not expected to."""

    def end_paused(self) -> None:
        """End the processes that have paused: the next start has new ones."""

    def starting_point(self) -> StartingPoint:
        """Return the newest complete snapshot of this job, or where it began."""

    def drop_missing_hosts(self) -> str:
        """Drop the hosts that have not come back; return a sentence about it, empty where the
        job needs them.
        """

    def report(self, text: str) -> None:
        """Report to the user."""

    def now(self) -> float:
        """Return the seconds of a clock that is never set."""

    def pause(self, seconds: float) -> bool:
        """Wait; return True at once when the user asks the job to stop."""


class LostIterations:
    """The iterations that losses make a job compute again, as far as they were reported."""

    def __init__(self) -> None:
        self._reached = 0  # of all starts
        self._lost_at = 0
        self._before = 0  # repeated before the last loss
        self._since = 0  # by it

    @property
    def repeated(self) -> int:
        """Their number."""
        return self._before + self._since

    def lose(self, iteration: int) -> None:
        """Note a loss after an iteration."""
        self._reached, self._lost_at = max(self._reached, iteration), iteration
        self._before, self._since = self.repeated, 0

    def resume(self, iteration: int) -> str:
        """Note from which iteration the job continues; return the end of a sentence. Not every
        iteration is reported: of none nothing is known.
        """
        self._since = max(0, self._lost_at - iteration)
        left = self._reached - iteration
        return f", at least {counted(left, 'iteration')} to repeat" if left > 0 else ""


class Restarts:
    """The starts of one job.

    Args:
        driver: carries them out.
        most: restarts after a loss while the job ran; 0: none.
        return_timeout_s: how long to wait for hosts to come back, from the first start that fails
            to the beginning of the last attempt.
    """

    def __init__(
        self, driver: RestartDriver, most: int, return_timeout_s: float = RETURN_TIMEOUT_S
    ) -> None:
        self._driver = driver
        self._most = most
        self._return_timeout_s = return_timeout_s
        self._restarts = 0
        self._paused_s = 0.0  # since the last loss
        self._failed_at_s: float | None = None  # the first start since then
        self._lost = LostIterations()
        self._point = StartingPoint()
        self._memory_starts = 0
        self._in_vain = 0
        self._explained = ""

    def run(self) -> RestartedJob:
        """Run the job to its end, with restarts.

        Raises:
            JobError: it failed for a reason that no restart mends, or too often, or the user has
                stopped it between two starts.
        """
        point = self._driver.starting_point()
        for attempt in itertools.count():
            try:
                result = self._driver.start(attempt, point)
            except JobInterrupted as loss:
                point = self._go_on(loss) or self._prepare(loss)
            else:
                if result.outcome is Outcome.REGROUPED:
                    point = self._regroup(result)
                    continue
                return RestartedJob(
                    result=result,
                    restarts=self._restarts,
                    repeated=self._lost.repeated,
                    memory_starts=self._memory_starts,
                )
        raise AssertionError("there is always a further start")

    def _go_on(self, loss: JobInterrupted) -> StartingPoint | None:
        """Return the snapshot in memory that the next start continues from; None where it has to be
        a restart.
        """
        found = self._driver.memory_point()
        self._in_vain = self._in_vain + 1 if found and found[0] == self._point else 0
        if found is None or self._in_vain >= MOST_IN_VAIN:
            self._driver.end_paused()
            return None
        self._wait_anew()
        self._lost.lose(loss.iteration)
        self._memory_starts += 1
        self._point, hosts = found
        self._driver.report(
            f"{loss}; continuing from iteration {self._point.iteration} in memory, "
            f"{hosts}{self._lost.resume(self._point.iteration)}"
        )
        return self._point

    def _regroup(self, result: JobResult) -> StartingPoint:
        """Return the snapshot in memory that a job continues from with other hosts."""
        found = self._driver.memory_point()
        if found is None:
            sentence = "the job has lost all its memory snapshots while it regrouped"
            loss = JobInterrupted(sentence, iteration=result.iteration or 0, while_starting=False)
            self._driver.end_paused()
            return self._prepare(loss)
        self._in_vain = 0
        self._point, hosts = found
        self._driver.report(f"continuing from iteration {self._point.iteration}, {hosts}")
        return self._point

    def _prepare(self, loss: JobInterrupted) -> StartingPoint:
        """Decide what follows a loss, report it, and wait before the next start.

        Raises:
            JobError: there is no further start.
        """
        # A job that continues from memory has run.
        tried_again = loss.while_starting and not self._point.memory
        if tried_again:
            self._wait_for_return(loss)
        else:
            self._count(loss)
        point = self._driver.starting_point()
        self._report(loss, point, tried_again=tried_again)
        self._explain(self._driver.from_disk_because())
        pause_s = min(FIRST_PAUSE_S + self._paused_s / 2, LONGEST_PAUSE_S)
        if tried_again:
            pause_s = min(pause_s, max(0.0, self._return_timeout_s - self._waited_s()))
        self._paused_s += pause_s
        if self._driver.pause(pause_s):
            raise _ended(f"{loss}; it was not started again, because the user has stopped it", loss)
        return point

    def _count(self, loss: JobInterrupted) -> None:
        self._wait_anew()
        self._lost.lose(loss.iteration)
        if self._most == 0:
            how = self._driver.how_to_restart()
            raise _ended(f"{loss}; {how}" if how else str(loss), loss)
        if self._restarts == self._most:
            times = "once" if self._restarts == 1 else f"{self._restarts} times"
            raise _ended(
                f"{loss}; it had been started again {times} already (--max_restarts)", loss
            )
        self._restarts += 1

    def _wait_for_return(self, loss: JobInterrupted) -> None:
        if self._restarts == 0:
            raise _ended(str(loss), loss)
        waited_s = self._waited_s()
        if waited_s >= self._return_timeout_s:
            without = self._driver.drop_missing_hosts()
            if without:
                self._wait_anew()
                self._driver.report(without)
                return
            raise _ended(f"{loss} (waited {waited_s:.0f} s for it to come back)", loss)

    def _waited_s(self) -> float:
        """Return the seconds since the first start that failed after the last loss."""
        now_s = self._driver.now()
        if self._failed_at_s is None:
            self._failed_at_s = now_s
        return now_s - self._failed_at_s

    def _explain(self, why: str) -> None:
        if why and why != self._explained:
            self._driver.report(f"continuing from disk, not from memory: {why}")
        self._explained = why

    def _wait_anew(self) -> None:
        self._paused_s, self._failed_at_s = 0.0, None

    def _report(self, loss: JobInterrupted, point: StartingPoint, *, tried_again: bool) -> None:
        # A snapshot can be lost with its host: only the start that follows decides what is
        # repeated.
        to_repeat = "" if point.is_scripts else self._lost.resume(point.iteration)
        unchanged, self._point = point == self._point, point
        if tried_again and unchanged:
            self._driver.report(f"{loss}; trying again")
            return
        what = "trying again" if tried_again else f"restart {self._restarts} of {self._most}"
        where = point.beginning
        if point.state:
            where = f"from {point.state} at iteration {point.iteration}"
        self._driver.report(f"{loss}; {what}: continuing {where}{to_repeat}")


def _ended(sentence: str, loss: JobInterrupted) -> JobError:
    error = JobError(sentence)
    error.exit_code = loss.exit_code
    return error


def describe_ending(job: str, ended: RestartedJob) -> str:
    """Return the job's last log line: `job x finished at iteration 500 after 2
    restarts, at least 37 iterations repeated`.
    """
    result = ended.result
    where = "" if result.iteration is None else f" at iteration {result.iteration}"
    text = f"job {job} {result.outcome.value}{where}"
    starts = [counted(ended.restarts, "restart")] if ended.restarts else []
    if ended.memory_starts:
        starts.append(f"{counted(ended.memory_starts, 'start')} from memory")
    if not starts:
        return text
    text = f"{text} after {' and '.join(starts)}"
    if not ended.repeated:
        return text
    return f"{text}, at least {counted(ended.repeated, 'iteration')} repeated"
