"""What a launcher and the agent on a host say to each other: one JSON object a line.

The launcher orders:
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

An empty program's name means the agent's own interpreter.

Law: pure; `decode_order` and `decode_report` are the border, and what comes out of them has the types below. Who hears
anything else ends the talk.
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


class SignalWord(Enum):
    """How a process is asked to end."""

    TERMINATE = "terminate"
    """It may finish what it must."""
    KILL = "kill"
    """At once, with all that it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greet:
    """The first order.

    Attributes:
        protocol: of the launcher.
        version: of the launcher's Poseidon.
        record: the job, as `poseidon.cluster.jobs.registry.record_fields` writes it.
        silence_s: how long a launcher that says nothing is believed to be there.
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
class Send:
    """Give a process a line on its standard input."""

    id: int
    line: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Ask a process to end."""

    id: int
    signal: SignalWord


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, either way."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End what still runs, and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The answer to `Greet`.

    Attributes:
        protocol: of the agent.
        version: of its Poseidon.
        pid: its process.
        cores: CPUs that it may use.
        scratch: a folder that only this user can enter, there for as long as the agent is.
    """

    protocol: int
    version: str
    pid: int
    cores: int
    scratch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A process was started."""

    id: int
    pid: int
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A process could not be started; also, with id -1, why the agent goes at once."""

    id: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A process said an event."""

    id: int
    event: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """A process wrote a line of free text."""

    id: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process has ended; nothing more comes of it."""

    id: int
    status: int


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The user has killed the job on this host; the agent goes."""


Order = Greet | Start | Send | Signal | Beat | Leave
Report = Here | Begun | Refused | Told | Wrote | Ended | Unwanted | Beat

_ORDERS: dict[str, type] = {
    "greet": Greet, "start": Start, "send": Send, "signal": Signal, "beat": Beat, "leave": Leave,
}  # fmt: skip
_REPORTS: dict[str, type] = {
    "here": Here, "started": Begun, "refused": Refused, "event": Told, "log": Wrote, "exited": Ended,
    "unwanted": Unwanted, "beat": Beat,
}  # fmt: skip


class WireError(ValueError):
    """A line is none of the above."""


def encode_order(order: Order) -> bytes:
    """An order as one line."""
    return _encode("do", _ORDERS, order)


def encode_report(report: Report) -> bytes:
    """A report as one line."""
    return _encode("is", _REPORTS, report)


def decode_order(line: bytes) -> Order:
    """The order in a line.

    Raises:
        WireError: there is none.
    """
    kind, fields = _open(line, "do", _ORDERS)
    order: Order
    if kind is Greet:
        order = Greet(
            protocol=_whole(fields, "protocol"),
            version=_text(fields, "version"),
            record=_object(fields, "record"),
            silence_s=_seconds(fields, "silence_s"),
            grace_s=_seconds(fields, "grace_s"),
        )
    elif kind is Start:
        order = Start(
            id=_whole(fields, "id"),
            name=_name(_object(fields, "name")),
            argv=_texts(fields, "argv"),
            environment=_environment(_object(fields, "environment")),
            first_line=_text(fields, "first_line"),
        )
    elif kind is Send:
        order = Send(id=_whole(fields, "id"), line=_text(fields, "line"))
    elif kind is Signal:
        order = Signal(id=_whole(fields, "id"), signal=_member(SignalWord, fields.get("signal")))
    else:
        order = Beat() if kind is Beat else Leave()
    return order


def decode_report(line: bytes) -> Report:
    """The report in a line.

    Raises:
        WireError: there is none.
    """
    kind, fields = _open(line, "is", _REPORTS)
    if kind is Beat:
        return Beat()
    if kind is Unwanted:
        return Unwanted()
    if kind is Here:
        return Here(
            protocol=_whole(fields, "protocol"),
            version=_text(fields, "version"),
            pid=_whole(fields, "pid"),
            cores=_whole(fields, "cores"),
            scratch=_text(fields, "scratch"),
        )
    number = _whole(fields, "id")
    if kind is Begun:
        return Begun(id=number, pid=_whole(fields, "pid"), created_s=_seconds(fields, "created_s"))
    if kind is Refused:
        return Refused(id=number, message=_text(fields, "message"))
    if kind is Told:
        return Told(id=number, event=_object(fields, "event"))
    if kind is Wrote:
        return Wrote(id=number, line=_text(fields, "line"))
    return Ended(id=number, status=_whole(fields, "status"))


def _encode(key: str, kinds: Mapping[str, type], message: Order | Report) -> bytes:
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
