"""The settings, states, events and actions of a supervised job.

Law: values only; `state_machine.py` alone decides.

The positions of a script's workers in their loops, and what is wrong whatever they do next.

Law: pure. A report costs as many comparisons as there are different positions, which are few,
however many the workers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from poseidon.base.call_names import DISTRIBUTE, LEAVING, MEANS, OF_TORCH, STEP, VALUES
from poseidon.cluster.events import Event, Paused, ReportedPosition
from poseidon.cluster.job_plan import ProcessName

RETURN_TIMEOUT_S = 180.0


class SignalEffect(Enum):
    """The effect of a signal to the launcher on training, as Caffe's --sigint_effect and
    --sighup_effect.
    """

    STOP = "stop"  # take a snapshot where the solver says so, and end
    SNAPSHOT = "snapshot"  # take a snapshot and continue
    NONE = "none"  # nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionSettings:
    """The launcher's timeouts, in seconds, and the effects of signals.

    Attributes:
        start_timeout_s: until every shard listens and every worker is ready.
        stall_timeout_s: without a heartbeat from a process that was ready.
        grace_s: from SIGTERM to SIGKILL.
        collect_s: to wait for a better cause than the first one reported.
        finish_timeout_s: from the end of a process's work to its exit.
        term_deadline_s: from SIGTERM to the end of the job, its last snapshot included.
        sigint_effect: of Ctrl-C.
        sighup_effect: of SIGHUP.
    """

    start_timeout_s: float = 180.0
    stall_timeout_s: float = 120.0
    grace_s: float = 3.0
    collect_s: float = 0.5
    finish_timeout_s: float = 30.0
    term_deadline_s: float = 25.0  # Slurm and Kubernetes kill after 30
    sigint_effect: SignalEffect = SignalEffect.STOP
    sighup_effect: SignalEffect = SignalEffect.SNAPSHOT


DEFAULT_SUPERVISION = SupervisionSettings()
"""Of every job whose flags say nothing else."""


class JobState(Enum):
    """The state of a job."""

    STARTING = "starting"  # processes are starting
    RUNNING = "running"  # all shards listen, all workers are ready
    FINISHING = "finishing"  # all workers have ended well; the shards were asked to end
    PAUSING = (
        "pausing"  # something was lost, or the job regroups; the processes that are left pause
    )
    FAILING = "failing"  # there is a cause; the processes are being ended
    ENDED = "ended"  # no process is left, save those that have paused


class Pausing(Enum):
    """When the processes that are left after a loss pause, rather than end."""

    NEVER = "never"
    """A loss ends the job, or restarts it with new processes."""
    RUNNING = "running"
    """Once the job runs: before, there is nothing to keep."""
    ALWAYS = "always"
    """Also while it starts: it continues from memory."""


class Outcome(Enum):
    """The outcome of a job that did not fail."""

    FINISHED = "finished"  # all iterations are done
    STOPPED = "stopped"  # it stopped on request, after a complete iteration
    REGROUPED = "regrouped"  # all processes have paused on request: the job continues with others


class CauseRank(IntEnum):
    """How near a cause is to the root; of several, the lowest is reported."""

    ROOT = 0  # killed, silent, never started: no other process is the cause
    OWN_ERROR = 1  # a process reported an error of its own
    UNEXPLAINED = 2  # a process ended without a report
    PEER_LOST = 3  # a process reported the loss of a peer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """Event: a process was started."""

    name: ProcessName
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStartFailed:
    """Event: a process could not be started.

    Attributes:
        name: of the process.
        message: one sentence with the reason.
        killed_by_user: the user has killed the job on that host.
    """

    name: ProcessName
    message: str
    killed_by_user: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReported:
    """Event: a process printed an event."""

    name: ProcessName
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited:
    """Event: a process has ended; `last_line` is its last line of free text, or empty."""

    name: ProcessName
    status: int
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived:
    """Event: a signal asks to stop training, or to take a snapshot.

    Attributes:
        effect: of the signal.
        within_s: seconds after which the sender is expected to kill the job; None: no limit.
        exit_code: of a job that stops for it.
    """

    effect: SignalEffect
    within_s: float | None = None
    exit_code: int = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupRequested:
    """Event: the job is to continue with other hosts, from its next memory snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time has passed."""


JobEvent = (
    ProcessStarted
    | ProcessStartFailed
    | ProcessReported
    | ProcessExited
    | SignalReceived
    | RegroupRequested
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLine:
    """Action: write a line to a process."""

    name: ProcessName
    line: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Action: send SIGTERM to a process."""

    name: ProcessName


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Action: send SIGKILL to a process."""

    name: ProcessName


Action = SendLine | Terminate | Kill


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


@dataclass(slots=True, kw_only=True)
class ProcessState:
    """The state of one process."""

    name: ProcessName
    reported_s: float
    moved_s: float | None = None
    position: ReportedPosition | None = None
    pid: int | None = None
    ready: bool = False
    iteration: int | None = None
    explained: bool = False
    finish_by_s: float | None = None
    paused: Paused | None = None
    given_up: bool = False
    counted: bool = False
    """As `pausing`, when the job last counted it."""
    status: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self.pid is not None and self.status is None

    @property
    def pausing(self) -> bool:
        """Whether it runs, has not paused, and is still expected to."""
        return self.running and self.paused is None and not self.given_up

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


@dataclass(slots=True, kw_only=True)
class ShutdownState:
    """The deadlines of a failing job; None once past."""

    terminate_at_s: float | None
    kill_at_s: float | None = None
    give_up_at_s: float | None = None


@dataclass(slots=True, kw_only=True)
class PauseState:
    """A job whose processes pause.

    Attributes:
        began_s: when the first one has paused, or something was lost.
        asked: those that were asked to pause.
        due: whether to look for those that are to be asked or given up.
    """

    began_s: float
    asked: set[ProcessName] = field(default_factory=set)
    due: bool = True


ENDING = (STEP, MEANS)
OF_STEPS = ("", VALUES, *ENDING)
"""Those in which no collection is begun."""


class LoopPositions:
    """The last position that each worker has reported."""

    def __init__(self) -> None:
        self._positions: dict[int, ReportedPosition] = {}
        self._ranks: dict[ReportedPosition, dict[int, None]] = {}
        self._absent: int | None = None

    def move(self, rank: int, position: ReportedPosition) -> str | None:
        """Take a position. Return a sentence about two workers that made different numbers of
        steps before a collection, or make the same call of different loops, or of which one has
        left with an exception, or as `end_without_joining`; or None.

        A finding is certain, whenever the positions were reported: a worker that waits in a
        collection makes no step before all have begun it. So another that has not begun it, yet has
        made or ends more steps, waits for this one in an earlier collection, or will be too late.
        One that an exception takes out of its `with` block counts that as a collection: if it waits
        there for the others, it begins no other one that they may wait in.
        """
        before = self._positions.get(rank)
        self._positions[rank] = position
        if before is not None:
            del self._ranks[before][rank]
            if not self._ranks[before]:
                del self._ranks[before]
        self._ranks.setdefault(position, {})[rank] = None
        for other, ranks in self._ranks.items():
            first = next(iter(ranks))
            if _passed_by(position, other):
                return _mismatch(rank, position, first, other)
            if _passed_by(other, position):
                return _mismatch(first, other, rank, position)
            if _waits_for_raised(position, other):
                return _left(rank, position, first, other)
            if _waits_for_raised(other, position):
                return _left(first, other, rank, position)
            if _are_apart(position, other):
                return _apart({rank: position, first: other})
        return self._unjoined()

    def end_without_joining(self, rank: int) -> str | None:
        """Note that a worker has ended without `distribute`. Return a sentence about one that waits
        there for it; or None.
        """
        self._absent = rank if self._absent is None else self._absent
        return self._unjoined()

    def _unjoined(self) -> str | None:
        if self._absent is None:
            return None
        for position, ranks in self._ranks.items():
            if position.collection == DISTRIBUTE:
                return (
                    f"worker {next(iter(ranks))} waits in distribute(), but worker {self._absent} "
                    "has ended without calling it: every worker must call poseidon.distribute()"
                )
        return None


def _reached(position: ReportedPosition) -> int:
    return position.steps + (position.collection == STEP)


def _passed_by(position: ReportedPosition, other: ReportedPosition) -> bool:
    """Return whether a worker waits for a worker that has continued without it."""
    return (
        position.collection not in OF_STEPS
        and not position.raised  # others may raise it after a later step
        and other.collections < position.collections
        and _reached(other) > position.steps
    )


def _waits_for_raised(position: ReportedPosition, other: ReportedPosition) -> bool:
    """Return whether a worker waits in a call of torch.distributed that another worker does not
    make, because an exception has ended its `with` block. The exchange finds this for other calls.
    """
    return (
        position.collection.startswith(OF_TORCH)
        and bool(other.raised and other.collection)
        and position.collections == other.collections
    )


def _awaits(position: ReportedPosition, other: ReportedPosition) -> bool:
    """Return whether a worker waits for a call that a different worker has not begun."""
    loop, call = position.loop, position.collection
    if loop is None or position.raised or call in ("", STEP):
        return False
    if call == DISTRIBUTE:
        return len(other.loops) < len(position.loops)
    if call in OF_STEPS:
        return _ended(other, loop) < _ended(position, loop)
    return other.collections < position.collections


def _ended(position: ReportedPosition, loop: int) -> int:
    return position.loops[loop] if loop < len(position.loops) else 0


def _are_apart(position: ReportedPosition, other: ReportedPosition) -> bool:
    """Return whether two workers wait for each other; or, after equally many steps and collections,
    end a step of different loops, or wait in collections of different loops.
    """
    if _awaits(position, other) and _awaits(other, position):
        return True
    loops = position.loop, other.loop
    return (
        None not in loops
        and loops[0] != loops[1]
        and not {position.collection, other.collection} & {"", DISTRIBUTE, VALUES}
        and (position.collection in ENDING) == (other.collection in ENDING)
        and not (position.raised or other.raised)
        and _reached(position) == _reached(other)
        and position.collections == other.collections
    )


def _apart(positions: Mapping[int, ReportedPosition]) -> str:
    calls = [f"worker {rank} {_does(position)}" for rank, position in sorted(positions.items())]
    return f"{', and '.join(calls)}: all workers must make the same calls in the same order"


def _does(position: ReportedPosition) -> str:
    loop, call = position.loop or 0, position.collection
    if loop < 0 or call == DISTRIBUTE:
        return f"waits in {call}()"
    if call == LEAVING:
        return f"waits at the end of the `with` block of module {loop + 1}"
    if call == VALUES:
        return f"waits for the values of module {loop + 1} after its step {_ended(position, loop)}"
    does = "ends a step" if call in ENDING else f"waits in {call}()"
    return f"{does} of module {loop + 1}"


def _left(rank: int, position: ReportedPosition, other: int, leaver: ReportedPosition) -> str:
    return (
        f"worker {other}: {leaver.raised}; so it has left its `with` block, and worker {rank} waits "
        f"for it in {position.collection}() after step {position.steps}"
    )


def _mismatch(rank: int, position: ReportedPosition, other: int, ahead: ReportedPosition) -> str:
    waits, must = f"in {position.collection}()", f"call {position.collection}()"
    if position.collection == LEAVING:
        waits, must = "at the end of its `with` block", "end it"
    return (
        f"worker {rank} waits {waits} after step {position.steps}, but worker {other} has "
        f"continued to step {_reached(ahead)}: all workers must {must} after the same number of "
        "steps"
    )
