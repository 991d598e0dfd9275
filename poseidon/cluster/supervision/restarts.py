"""Starting a job again when something of it was lost.

Law: only what was lost is a reason (`JobInterrupted`); a mistake, a full disk or the user's wish ends the job as before. Every
new start goes on from the newest snapshot that this job itself has written and that is whole, or else from where the job
began; at staleness 0 it ends with the bits of a job that never stopped.

A start that fails because a host is not back yet is tried again, less and less often, for `return_timeout_s`; only what was
lost while the job ran counts as a restart. Where all hosts read the same data, the job then goes on without those that are
still missing; the records are divided among fewer, so the bits are no longer those of the job as it began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from poseidon.cluster.supervision.loop import JobResult
from poseidon.errors import JobError, JobInterrupted

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
RETURN_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSettings:
    """How often, and for how long.

    Attributes:
        most: new starts after a loss while the job ran; 0: none.
        return_timeout_s: how long to wait for hosts to come back.
    """

    most: int = 0
    return_timeout_s: float = RETURN_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where a start goes on from.

    Attributes:
        state: the solver state; empty: where the job began.
        iteration: iterations finished there.
    """

    state: str = ""
    iteration: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """A job that ended well.

    Attributes:
        result: of its last start.
        restarts: how often it was started again.
        repeated: iterations that were done more than once, as far as the launcher knows: it hears of each a moment later.
    """

    result: JobResult
    restarts: int
    repeated: int


class Surroundings(Protocol):
    """What a job that starts again needs of the world."""

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        """Run the job to its end; `attempt` counts from 0.

        Raises:
            JobInterrupted: something was lost.
            JobError: it failed in another way.
        """

    def starting_point(self) -> StartingPoint:
        """The newest whole snapshot of this job, or where it began."""

    def do_without(self) -> str:
        """Leave out the hosts that have not come back; a sentence that says so, empty where the job needs them."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def pause(self, seconds: float) -> bool:
        """Wait; True at once when the user wants the job to end."""


def run_with_restarts(surroundings: Surroundings, settings: RestartSettings) -> Restarted:
    """Run a job to its end, through losses.

    Raises:
        JobError: it failed for a reason that a new start does not mend, or too often, or the user has stopped it between
            two starts.
    """
    return _Restarts(surroundings, settings).run()


class _Restarts:
    """The starts of one job so far."""

    def __init__(self, surroundings: Surroundings, settings: RestartSettings) -> None:
        self._surroundings = surroundings
        self._settings = settings
        self._attempt = 0
        self._restarts = 0
        self._repeated = 0
        self._waited_s = 0.0
        self._reached = 0

    def run(self) -> Restarted:
        """See `run_with_restarts`."""
        point = self._surroundings.starting_point()
        while True:
            try:
                result = self._surroundings.start(self._attempt, point)
            except JobInterrupted as loss:
                point = self._prepare(loss)
            else:
                return Restarted(result=result, restarts=self._restarts, repeated=self._repeated)

    def _prepare(self, loss: JobInterrupted) -> StartingPoint:
        """Decide what follows a loss, tell it, and wait a moment.

        Raises:
            JobError: nothing follows.
        """
        if loss.while_starting:
            self._wait_for_return(loss)
        else:
            self._count(loss)
        point = self._surroundings.starting_point()
        self._tell(loss, point)
        self._attempt += 1
        pause_s = min(FIRST_PAUSE_S + self._waited_s / 2, LONGEST_PAUSE_S)
        self._waited_s += pause_s
        if self._surroundings.pause(pause_s):
            raise _ended(f"{loss}; it was not started again, since it was asked to stop", loss)
        return point

    def _count(self, loss: JobInterrupted) -> None:
        self._waited_s = 0.0
        self._reached = max(self._reached, loss.iteration)
        if self._settings.most == 0:
            raise _ended(str(loss), loss)
        if self._restarts == self._settings.most:
            times = "once" if self._restarts == 1 else f"{self._restarts} times"
            raise _ended(f"{loss}; it had been started again {times} already (--max_restarts)", loss)
        self._restarts += 1

    def _wait_for_return(self, loss: JobInterrupted) -> None:
        if self._restarts == 0:
            raise _ended(str(loss), loss)
        if self._waited_s >= self._settings.return_timeout_s:
            without = self._surroundings.do_without()
            if without:
                self._waited_s = 0.0
                self._surroundings.say(without)
                return
            raise _ended(f"{loss} (waited {self._waited_s:.0f} s for it to come back)", loss)

    def _tell(self, loss: JobInterrupted, point: StartingPoint) -> None:
        where = f"from {point.state}" if point.state else "from the beginning"
        if loss.while_starting:
            self._surroundings.say(f"{loss}; trying again")
            return
        repeated = max(0, loss.iteration - point.iteration)
        self._repeated += repeated
        count = f"{repeated} iteration{'' if repeated == 1 else 's'}"
        self._surroundings.say(
            f"{loss}; restart {self._restarts} of {self._settings.most}: going on {where} at iteration "
            f"{point.iteration}, at least {count} to repeat"
        )


def _ended(sentence: str, loss: JobInterrupted) -> JobError:
    error = JobError(sentence)
    error.exit_code = loss.exit_code
    return error


def ending_words(job: str, ended: Restarted) -> str:
    """`job x finished at iteration 500 after 2 restarts, at least 37 iterations repeated`."""
    result = ended.result
    words = f"job {job} {result.outcome.value} at iteration {result.iteration}"
    if not ended.restarts:
        return words
    times = f"{ended.restarts} restart{'' if ended.restarts == 1 else 's'}"
    again = f"at least {ended.repeated} iteration{'' if ended.repeated == 1 else 's'} repeated"
    return f"{words} after {times}, {again}"
