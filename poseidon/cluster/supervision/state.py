"""The settings, states, events and actions of a supervised job.

Law: values only; `state_machine.py` alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from poseidon.base.settings import GRACE_S
from poseidon.cluster.events import Event
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
    grace_s: float = GRACE_S
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a job that did not fail.

    Attributes:
        outcome: whether it has finished or was stopped.
        iteration: the last that the first worker has reported; None: a script without steps.
        exit_code: 0, or the code for the signal that stopped it.
    """

    outcome: Outcome
    iteration: int | None
    exit_code: int = 0


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
