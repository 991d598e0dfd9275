"""What can happen to a job (inputs), what can be done about it (actions), and where that leaves it.

Law: values only; `supervision.py` alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from poseidon.cluster.events import Event
from poseidon.cluster.plan import ProcessName
from poseidon.cluster.supervision.settings import SignalEffect


class JobState(Enum):
    """Where a job stands."""

    STARTING = "starting"  # processes are coming up
    RUNNING = "running"  # all shards listen, all workers are ready
    FINISHING = "finishing"  # all workers have ended well; the shards have been asked to
    FAILING = "failing"  # there is a cause; the processes are being ended
    ENDED = "ended"  # no process is left


class Outcome(Enum):
    """How a job that did not fail has ended."""

    FINISHED = "finished"  # all iterations are done
    STOPPED = "stopped"  # it was asked to stop, and did after a clean iteration


class CauseRank(IntEnum):
    """How near a cause is to the root; of several, the lowest is told."""

    ROOT = 0  # killed, silent, never started: nobody else did that to it
    OWN_ERROR = 1  # a process told what went wrong with itself
    UNEXPLAINED = 2  # a process ended and said nothing
    PEER_LOST = 3  # a process told that another one had gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Input: a process was started."""

    name: ProcessName
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """Input: a process could not be started; `message` is the sentence that says why, `unwanted` that the user ended it there."""

    name: ProcessName
    message: str
    unwanted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Input: a process said something."""

    name: ProcessName
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """Input: a process has ended; `last_line` is the last it wrote as free text, or empty."""

    name: ProcessName
    status: int
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Input: the user wants training to stop, or a snapshot.

    Attributes:
        effect: what is wanted.
        within_s: seconds after which somebody ends the job anyway; None: nobody does.
        exit_code: of a job that stops for it.
    """

    effect: SignalEffect
    within_s: float | None = None
    exit_code: int = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Input: time has passed."""


Input = Started | NotStarted | Heard | Exited | Requested | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Action: write a line to a process."""

    name: ProcessName
    line: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Action: ask a process to end."""

    name: ProcessName


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Action: make a process end."""

    name: ProcessName


Action = Send | Terminate | Kill


class Remedy(Enum):
    """What may help a job that fails."""

    NONE = "none"  # it would fail again, or somebody wants it ended
    RESTART = "restart"  # something was lost that ran: a new start may well succeed
    RETRY = "retry"  # something did not start: the same may start later, if it ever has


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job fails."""

    rank: CauseRank
    sentence: str
    exit_code: int = 1
    remedy: Remedy = Remedy.NONE
