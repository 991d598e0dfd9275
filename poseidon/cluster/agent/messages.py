"""The messages between a launcher and the agent on a host. `wire.py` has their format.

The launcher sends requests: `Hello` first, then `Start` for each process, with ids of its choice,
and the others for a known id. The agent answers with reports. An empty program name stands for the
agent's own interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from poseidon.cluster.plan import ProcessName
from poseidon.cluster.process import OutputStream

PROTOCOL = 1
OWN_INTERPRETER = ""


class ProcessSignal(Enum):
    """How a process is ended."""

    TERMINATE = "terminate"
    """SIGTERM: it may clean up."""
    KILL = "kill"
    """SIGKILL, to it and to all that it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first request.

    Attributes:
        protocol: of the launcher.
        version: of the launcher's Poseidon.
        record: the job, as `poseidon.cluster.jobs.registry.record_fields` writes it.
        silence_s: without a request, after which the agent takes the launcher for lost.
        grace_s: from SIGTERM to SIGKILL when the agent ends its processes.
    """

    protocol: int
    version: str
    record: Mapping[str, object]
    silence_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process."""

    id: int
    name: ProcessName
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    first_line: str = field(repr=False)
    own_stdout: bool = False

    def __post_init__(self) -> None:
        if not self.argv:
            raise ValueError("argv is empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLine:
    """Write a line to a process's standard input."""

    id: int
    line: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal:
    """End a process."""

    id: int
    signal: ProcessSignal


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, in either direction."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End what still runs, then exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to `Hello`.

    Attributes:
        protocol: of the agent.
        version: of its Poseidon.
        pid: its process.
        cores: CPUs that it may use.
        scratch: a folder that only this user can enter; it lasts as long as the agent.
    """

    protocol: int
    version: str
    pid: int
    cores: int
    scratch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process was started."""

    id: int
    pid: int
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A process could not be started; with id -1: why the agent exits at once."""

    id: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """A process printed an event."""

    id: int
    event: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReport:
    """A process has written a piece of free text."""

    id: int
    stream: OutputStream
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process has ended; no report of it follows."""

    id: int
    status: int


@dataclass(frozen=True, slots=True)
class KilledByUser:
    """The user has killed the job on this host; the agent exits."""


Request = Hello | Start | SendLine | SendSignal | Heartbeat | Shutdown
Report = (
    Welcome | Started | Refused | EventReport | OutputReport | Exited | KilledByUser | Heartbeat
)
