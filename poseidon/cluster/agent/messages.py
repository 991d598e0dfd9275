"""The messages between a launcher and the agent on a host, and their format.

The launcher sends requests, `AgentHello` first; the agent answers with reports. An `id` belongs to one
process or one question, and the launcher chooses it. Files and checks of a host use the same channel
as its processes. An empty program name stands for the agent's own interpreter.

A message is a JSON object on a line, then bytes:

    {"kind": "Put", "id": 3, "path": "/tmp/x/net.prototxt", "offset": 0}
    <content>

`kind` is the name of the message's class, and the other keys are its fields, except its field of
bytes, which follows the line as it is.

Law: pure. What `decode` returns has the types of its class (`ps_server/json_fields.py`). Either side
closes the connection when it receives anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar, get_args

from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import PoseidonError
from ps_server.json_fields import fields_of, plain, value_of

PROTOCOL = 1
OWN_INTERPRETER = ""
AGENT_ITSELF = -1
"""The id of a report that concerns the agent, not a process or a question."""


class ProcessSignal(Enum):
    """How a process is ended."""

    TERMINATE = "terminate"
    """SIGTERM: it may clean up."""
    KILL = "kill"
    """SIGKILL, to it and to all that it started."""


class Service(Enum):
    """What answers an `Ask`, on the host."""

    CHECK = "check"
    """`poseidon.cluster.host_probe`: whether a job can run here."""
    FILES = "files"
    """`poseidon.cluster.agent.files`: which files are here; names for those that have arrived."""
    LIST = "list"
    """`poseidon.cluster.jobs.this_host`: this user's jobs."""
    KILL = "kill"
    """The same: stops some of them."""
    LINKS = "links"
    """`poseidon.cluster.doctor.probe`: the links to other hosts."""
    TEMPLATE = "template"
    """`poseidon.cluster.agent.template`: imports what processes will need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """The first request.

    Attributes:
        protocol: of the launcher.
        version: of the launcher's Poseidon.
        silence_s: without a request, after which the agent takes the launcher for lost.
        grace_s: from SIGTERM to SIGKILL when the agent ends its processes.
    """

    protocol: int
    version: str
    silence_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Put the job on record on this host while its processes run."""

    record: JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess:
    """Start a process."""

    id: int
    spec: ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLine:
    """Write a line to a process's standard input."""

    id: int
    line: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSignal:
    """End a process."""

    id: int
    signal: ProcessSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask a service of the host; it answers with `Answer` or `Refused`.

    Attributes:
        service: which.
        request: as the service's module describes it.
    """

    id: int
    service: Service
    request: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a part of a file; the agent answers with an empty `Answer` or with `Refused`.

    Attributes:
        path: on the host.
        offset: where the content goes, in bytes; 0 begins a new file.
        content: the bytes.
    """

    id: int
    path: str
    offset: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """Read a part of a regular file; the agent answers with `Content` or with `Refused`.

    Attributes:
        path: on the host.
        offset: where the part begins, in bytes.
        size: bytes at most.
    """

    id: int
    path: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAll:
    """End all processes, and forget the job: its record, and what was sent for it.

    The agent answers with an empty `Answer`; it stays.
    """

    id: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, in either direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End what still runs, then exit.

    Attributes:
        status: the exit status of an agent that a scheduler has started.
        reason: why there is no job for it; empty where there was one.
    """

    status: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first report of an agent that a scheduler has started; the others begin with `AgentWelcome`.

    Attributes:
        version: of its Poseidon.
        rank: in the job.
        size: the number of tasks that it expects.
        local_rank: on its host.
        address: its own, on the route to rank 0.
        host: its host's name.
    """

    version: str
    rank: int
    size: int
    local_rank: int
    address: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWelcome:
    """The answer to `AgentHello`.

    Attributes:
        cores: CPUs that it may use.
        scratch: a folder that only this user can enter; it lasts as long as the agent.
    """

    cores: int
    scratch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process was started."""

    id: int
    pid: int
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A process could not be started, or a question has no answer; with the id `AGENT_ITSELF`: why
    the agent exits at once.
    """

    id: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to an `Ask`, a `Put` or `EndAll`."""

    id: int
    answer: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A part of a file.

    Attributes:
        size: bytes of the whole file.
        content: the part; empty at the end.
    """

    id: int
    size: int
    content: bytes = field(repr=False)


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
    """A process has ended; no report of it follows. With the id `AGENT_ITSELF` a task has."""

    id: int
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Signaled:
    """The machine or the scheduler has sent the agent a signal to end; the launcher decides what
    follows.

    Attributes:
        signal: its name.
    """

    signal: str


@dataclass(frozen=True, slots=True)
class KilledByUser:
    """The user has killed the job on this host; the agent exits."""


Request = (
    AgentHello
    | Register
    | StartProcess
    | WriteLine
    | SendSignal
    | Ask
    | Put
    | ReadFile
    | EndAll
    | Heartbeat
    | Shutdown
)
Report = (
    Join
    | AgentWelcome
    | Started
    | Refused
    | Answer
    | Content
    | EventReport
    | OutputReport
    | Exited
    | Signaled
    | KilledByUser
    | Heartbeat
)


class PeerSilence:
    """The silence of another process.

    Args:
        longest_wait_s: the longest time between two looks of a process that is not late.
        now_s: the time, by any steady clock.
    """

    def __init__(self, longest_wait_s: float, now_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._looked_s = self._known_s = now_s
        self._seconds = 0.0
        self.heard_s = now_s
        """When it was heard last. Another thread may set it."""

    def look(self, now_s: float) -> float:
        """Return for how many seconds it has been silent while this process was running."""
        since_s, self._looked_s = self._looked_s, now_s
        if self._known_s != self.heard_s:
            since_s = self._known_s = self.heard_s
            self._seconds = 0.0
        self._seconds += min(max(0.0, now_s - since_s), self._longest_wait_s)
        return self._seconds


_M = TypeVar("_M")


class WireError(ValueError):
    """What came is not a message of this protocol."""


class MessageCodec(Generic[_M]):
    """Encodes and decodes messages.

    Args:
        kinds: their classes: frozen dataclasses.
    """

    def __init__(self, *kinds: type[_M]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: _M) -> bytes:
        fields = fields_of(message)
        content = fields.pop("content", None)
        header = json.dumps({"kind": type(message).__name__, **fields}, default=plain).encode()
        return b"%b\n%b" % (header, content) if isinstance(content, bytes) else header

    def decode(self, encoded: bytes) -> _M:
        """Decode a message.

        Raises:
            WireError: it is not one of these.
        """
        header, _, content = encoded.partition(b"\n")
        try:
            fields = json.loads(header)
            kind = self._kinds[fields["kind"]]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise WireError(f"not a message: {encoded[:80]!r}") from error
        try:
            return value_of(kind, {**fields, "content": content})
        except (ValueError, PoseidonError) as error:
            raise WireError(str(error)) from error


REQUESTS: MessageCodec[Request] = MessageCodec(*get_args(Request))
REPORTS: MessageCodec[Report] = MessageCodec(*get_args(Report))
