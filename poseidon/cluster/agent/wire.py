"""The wire protocol between a launcher and the agent on a host: one JSON object a line.

The launcher requests:
    {"do": "greet", "protocol": 1, "version": "0.1.0", "record": {...}, "silence_s": 20.0, "grace_s": 5.0}
    {"do": "start", "id": 3, "name": {...}, "argv": ["", "-m", ...], "environment": {...}, "first_line": "..."}
    {"do": "send", "id": 3, "line": "..."}
    {"do": "signal", "id": 3, "signal": "terminate"}        or "kill"
    {"do": "beat"}
    {"do": "leave"}
and the agent reports:
    {"is": "here", "protocol": 1, "version": "0.1.0", "pid": 4711, "cores": 8, "scratch": "/tmp/x"}
    {"is": "started", "id": 3, "pid": 4712, "created_s": 1.7e9}
    {"is": "refused", "id": 3, "message": "one sentence"}
    {"is": "event", "id": 3, "event": {"event": "progress", ...}}
    {"is": "log", "id": 3, "line": "..."}
    {"is": "exited", "id": 3, "status": 0}
    {"is": "unwanted"}                                      the job was killed by its user here
    {"is": "beat"}

An empty program name stands for the agent's own interpreter.

Law: pure; `decode_request` and `decode_report` validate, and what they return has the types below. Either side closes
the connection on anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from poseidon.cluster.plan import ProcessName, Role

_E = TypeVar("_E", bound=Enum)
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
class LogReport:
    """A process printed a line of free text."""

    id: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process has ended; no report of it follows."""

    id: int
    status: int


@dataclass(frozen=True, slots=True)
class KilledByUser:
    """The user has killed the job on this host; the agent exits."""


Request = Hello | Start | SendLine | SendSignal | Heartbeat | Shutdown
Report = Welcome | Started | Refused | EventReport | LogReport | Exited | KilledByUser | Heartbeat

_REQUESTS: dict[str, type] = {
    "greet": Hello, "start": Start, "send": SendLine, "signal": SendSignal, "beat": Heartbeat, "leave": Shutdown,
}  # fmt: skip
_REPORTS: dict[str, type] = {
    "here": Welcome, "started": Started, "refused": Refused, "event": EventReport, "log": LogReport, "exited": Exited,
    "unwanted": KilledByUser, "beat": Heartbeat,
}  # fmt: skip


class WireError(ValueError):
    """A line is not a message of this protocol."""


def encode_request(request: Request) -> bytes:
    """Encode a request as one line."""
    return _encode("do", _REQUESTS, request)


def encode_report(report: Report) -> bytes:
    """Encode a report as one line."""
    return _encode("is", _REPORTS, report)


def decode_request(line: bytes) -> Request:
    """Decode the request in a line.

    Raises:
        WireError: it is not one.
    """
    kind, fields = _open(line, "do", _REQUESTS)
    request: Request
    if kind is Hello:
        request = Hello(
            protocol=_whole(fields, "protocol"),
            version=_text(fields, "version"),
            record=_object(fields, "record"),
            silence_s=_seconds(fields, "silence_s"),
            grace_s=_seconds(fields, "grace_s"),
        )
    elif kind is Start:
        request = Start(
            id=_whole(fields, "id"),
            name=_name(_object(fields, "name")),
            argv=_texts(fields, "argv"),
            environment=_environment(_object(fields, "environment")),
            first_line=_text(fields, "first_line"),
        )
    elif kind is SendLine:
        request = SendLine(id=_whole(fields, "id"), line=_text(fields, "line"))
    elif kind is SendSignal:
        request = SendSignal(id=_whole(fields, "id"), signal=_member(ProcessSignal, fields.get("signal")))
    else:
        request = Heartbeat() if kind is Heartbeat else Shutdown()
    return request


def decode_report(line: bytes) -> Report:
    """Decode the report in a line.

    Raises:
        WireError: it is not one.
    """
    kind, fields = _open(line, "is", _REPORTS)
    if kind is Heartbeat:
        return Heartbeat()
    if kind is KilledByUser:
        return KilledByUser()
    if kind is Welcome:
        return Welcome(
            protocol=_whole(fields, "protocol"),
            version=_text(fields, "version"),
            pid=_whole(fields, "pid"),
            cores=_whole(fields, "cores"),
            scratch=_text(fields, "scratch"),
        )
    number = _whole(fields, "id")
    if kind is Started:
        return Started(id=number, pid=_whole(fields, "pid"), created_s=_seconds(fields, "created_s"))
    if kind is Refused:
        return Refused(id=number, message=_text(fields, "message"))
    if kind is EventReport:
        return EventReport(id=number, event=_object(fields, "event"))
    if kind is LogReport:
        return LogReport(id=number, line=_text(fields, "line"))
    return Exited(id=number, status=_whole(fields, "status"))


def _encode(key: str, kinds: Mapping[str, type], message: Request | Report) -> bytes:
    word = next(word for word, kind in kinds.items() if kind is type(message))
    fields = {name: getattr(message, name) for name in type(message).__dataclass_fields__}
    return json.dumps({key: word, **fields}, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ProcessName):
        return {"role": value.role.value, "index": value.index, "client": value.client, "host": value.host}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} cannot be sent")


def _open(line: bytes, key: str, kinds: Mapping[str, type]) -> tuple[type, Mapping[str, object]]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    word = fields.get(key) if isinstance(fields, dict) else None
    if not isinstance(word, str) or word not in kinds:
        raise WireError(f"nothing known: {line[:80]!r}")
    return kinds[word], fields


def _name(fields: Mapping[str, object]) -> ProcessName:
    return ProcessName(
        role=_member(Role, fields.get("role")),
        index=_whole(fields, "index"),
        client=_whole(fields, "client"),
        host=_text(fields, "host"),
    )


def _member(kind: type[_E], value: object) -> _E:
    try:
        return kind(value)
    except ValueError as error:
        raise WireError(f"{value!r:.80} is no {kind.__name__}") from error


def _whole(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{name} is {value!r:.80}, expected a whole number")
    return value


def _seconds(fields: Mapping[str, object], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise WireError(f"{name} is {value!r:.80}, expected seconds")
    return float(value)


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} is {value!r:.80}, expected text")
    return value


def _texts(fields: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise WireError(f"{name} is {value!r:.80}, expected texts")
    return tuple(value)


def _object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise WireError(f"{name} is {value!r:.80}, expected an object")
    return value


def _environment(fields: Mapping[str, object]) -> Mapping[str, str]:
    if not all(isinstance(value, str) for value in fields.values()):
        raise WireError("an environment's values are texts")
    return {name: str(value) for name, value in fields.items()}
