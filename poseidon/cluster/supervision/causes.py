"""The processes of one job, as far as they have reported, and the causes for which it fails or pauses,
and its error.

Law: pure. The job's error is the sentence of the cause nearest to the root (`CauseRank`).
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from poseidon.base.call_names import LoopPosition
from poseidon.cluster.events import Failed, Paused
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import describe_exit
from poseidon.cluster.supervision.state import ProcessExited, SupervisionSettings
from poseidon.errors import JobError, JobInterrupted

MOST_NAMED = 8
"""Processes that a sentence names."""
THEN_STOPPED = "; the job was stopped"
"""The end of the sentence of a cause, unless the job continues with the processes that are left."""


@dataclass(slots=True, kw_only=True)
class ProcessState:
    """The state of one process."""

    name: ProcessName
    reported_s: float = 0.0
    moved_s: float | None = None
    position: LoopPosition | None = None
    pid: int | None = None
    ready: bool = False
    iteration: int | None = None
    saved: bool = False
    """A snapshot, in this start."""
    explained: bool = False
    finish_by_s: float | None = None
    paused: Paused | None = None
    status: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self.pid is not None and self.status is None

    @property
    def label(self) -> str:
        """The process in messages."""
        return self.name.describe(self.pid)

    @property
    def when(self) -> str:
        """The iteration or phase, at the end of a sentence. Not every iteration is reported."""
        if self.iteration is not None:
            return f", last seen at iteration {self.iteration}"
        return "" if self.ready else " while it was starting"


class JobProcesses:
    """All processes of the job."""

    def __init__(self, names: Sequence[ProcessName]) -> None:
        self.by_name = {name: ProcessState(name=name) for name in names}
        self.workers = [self.by_name[name] for name in names if name.role is Role.WORKER]
        self.shards = [name for name in names if name.role is Role.SHARD]
        self.unstarted, self.unready = set(names), set(names)

    @property
    def running(self) -> list[ProcessState]:
        return [process for process in self.by_name.values() if process.running]

    @property
    def ended(self) -> bool:
        """Whether no process runs."""
        return not any(process.running for process in self.by_name.values())

    @property
    def iteration(self) -> int:
        """The last iteration that any worker has reported."""
        reported = (worker.iteration or 0 for worker in self.workers)
        beats = (worker.position.iterations for worker in self.workers if worker.position)
        return max(itertools.chain(reported, beats))

    def start(self, name: ProcessName, pid: int, now: float) -> ProcessState:
        """Note that a process has started; return it."""
        process = self.by_name[name]
        process.pid, process.reported_s = pid, now
        self.unstarted.discard(name)
        return process

    def note_ready(self, process: ProcessState) -> None:
        process.ready = True
        self.unready.discard(process.name)


class CauseRank(IntEnum):
    """How near a cause is to the root; of several, the lowest is reported."""

    ROOT = 0  # killed, silent, never started: no other process is the cause
    OWN_ERROR = 1  # a process reported an error of its own
    UNEXPLAINED = 2  # a process ended without a report
    PEER_LOST = 3  # a process reported the loss of a peer


class Remedy(Enum):
    """Whether a new start may help a job that fails."""

    NONE = "none"  # it would fail again, or the user has ended it
    RESTART = "restart"  # something was lost that ran: start the job again
    RETRY = "retry"  # something did not start: try again later, if the job has ever run


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job fails."""

    rank: CauseRank
    sentence: str
    exit_code: int = 1
    remedy: Remedy = Remedy.NONE
    traceback: str = ""


class Causes:
    """The causes of one start of a job."""

    def __init__(self) -> None:
        self.known: list[Cause] = []
        self.ended_by_user = False
        """Whether the user has ended the job, or killed it on a host."""

    def error(
        self, iteration: int, *, continues: bool, left: Sequence[ProcessState]
    ) -> JobError | None:
        """Return the job's error after an iteration; None while nothing has failed.

        Args:
            continues: whether the job continues without the processes that were lost.
            left: the processes that did not end, where it is stopped.
        """
        if not self.known:
            return None
        cause = min(self.known, key=lambda cause: cause.rank)
        sentence = cause.sentence.removesuffix(THEN_STOPPED) if continues else cause.sentence
        if left:
            names = ", ".join(process.label for process in left[:MOST_NAMED])
            more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            sentence += f"; these did not end: {names}{more}"
        if cause.remedy is Remedy.NONE:
            error = JobError(sentence)
        elif self.ended_by_user:
            error = JobError(f"{sentence}; it is not started again, because the user has ended it")
        else:
            retry = cause.remedy is Remedy.RETRY
            error = JobInterrupted(sentence, iteration=iteration, while_starting=retry)
        error.exit_code, error.traceback = cause.exit_code, cause.traceback
        return error


def cause_of(
    process: ProcessState, rank: CauseRank, how: str, remedy: Remedy = Remedy.RESTART
) -> Cause:
    """Return the cause that a process is; `how` continues the sentence after its name."""
    return Cause(rank=rank, sentence=f"{process.label} {how}{THEN_STOPPED}", remedy=remedy)


def reported(event: Failed) -> Cause:
    """Return the cause that a process has reported."""
    rank = CauseRank.PEER_LOST if event.peer_lost else CauseRank.OWN_ERROR
    remedy = Remedy.RESTART if event.peer_lost or event.host_lost else Remedy.NONE
    return Cause(
        rank=CauseRank.ROOT if event.host_lost else rank,
        sentence=event.message,
        exit_code=event.exit_code,
        remedy=Remedy.RETRY if event.unreachable else remedy,
        traceback=event.traceback,
    )


def ended_early(process: ProcessState, exited: ProcessExited, *, was_ready: bool) -> Cause:
    """Return the cause that the unexpected end of a process is. One that ends by itself before it
    `was_ready` in any start would do so again.
    """
    status = exited.status
    how = (describe_exit(status) if status else "ended before its work was done") + process.when
    # a library that aborts has printed why
    if exited.last_line and (status > 0 or status == -signal.SIGABRT):
        how += f", its last line: '{exited.last_line}'"
    rank = CauseRank.ROOT if status < 0 else CauseRank.UNEXPLAINED
    remedy = Remedy.RESTART if status < 0 or was_ready else Remedy.NONE
    return cause_of(process, rank, how, remedy)


def overdue(process: ProcessState, settings: SupervisionSettings, now: float) -> Cause | None:
    """Return the cause that a running process is which is too late; None: it is not."""
    stall_s = settings.stall_timeout_s
    since = "" if process.iteration is None else f" (last seen at iteration {process.iteration})"
    if not process.ready and now >= settings.start_timeout_s:
        how = f"was not ready within {settings.start_timeout_s:g} s"
    elif process.finish_by_s is not None and now >= process.finish_by_s:
        how = f"did not end within {settings.finish_timeout_s:g} s of finishing its work"
    elif process.ready and now - process.reported_s >= stall_s:
        how = f"has sent no heartbeat for {stall_s:g} s{since}"
    elif process.moved_s is not None and now - process.moved_s >= stall_s:
        how = f"hangs: it has done nothing for {stall_s:g} s{since}"
    else:
        return None
    remedy = Remedy.RESTART if process.ready else Remedy.RETRY
    return cause_of(process, CauseRank.ROOT, how, remedy)
