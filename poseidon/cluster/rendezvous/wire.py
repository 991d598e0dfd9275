"""The wire protocol between rank 0 and the other tasks of a rendezvous: a JSON header, and bytes.

A task begins with JOIN; rank 0 answers WELCOME or DISMISS. From then on rank 0 has the leaders of
the hosts run programs (START, INPUT, END_INPUT, KILL), which they report on (OUTPUT, ERRORS,
ENDED). Both send HEARTBEAT when they have nothing else to send.

Law: pure; `decode` validates, and what it returns has the types below. The values of `Kind`
and the keys of the header are the wire format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_HEADER_BYTES = 1 << 20


class Kind(Enum):
    """The kind of a message."""

    JOIN = "here"
    """A task joins; `arguments` are the fields of its `TaskInfo`."""
    WELCOME = "welcome"
    """All tasks have joined."""
    START = "start"
    """Run the program `arguments`."""
    INPUT = "input"
    """`payload` for a program's standard input."""
    END_INPUT = "end input"
    """The end of a program's standard input."""
    KILL = "kill"
    """End a program."""
    OUTPUT = "output"
    """`payload` from a program's standard output."""
    ERRORS = "errors"
    """`payload` from its standard error."""
    ENDED = "ended"
    """A program has ended with `status`; no message of it follows."""
    SIGNALED = "asked"
    """The scheduler has sent the task a signal to end: `arguments` has its name."""
    DISMISS = "leave"
    """The job has ended, with `status` as the exit status of every task; `arguments` may have
    the reason.
    """
    HEARTBEAT = "alive"
    """A sign of life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; fields that its kind does not use are empty.

    Attributes:
        kind: its kind.
        program: the number of a program of this task, 1, 2, ...
        status: an exit status.
        arguments: argv, or as the kind says.
        payload: bytes of a program's input or output.
    """

    kind: Kind
    program: int = 0
    status: int = 0
    arguments: tuple[str, ...] = ()
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """What a task sends about itself when it joins.

    Attributes:
        version: of its Poseidon.
        rank: in the job.
        size: the number of tasks that it expects.
        local_rank: on its host.
        address: its own, on the route to rank 0.
        host: its host's name.
        python: its interpreter.
        folder: its working directory.
    """

    version: str
    rank: int
    size: int
    local_rank: int
    address: str
    host: str
    python: str = ""
    folder: str = ""

    def message(self) -> Message:
        """Return the JOIN message."""
        numbers = (str(self.rank), str(self.size), str(self.local_rank))
        texts = (self.address, self.host, self.python, self.folder)
        return Message(kind=Kind.JOIN, arguments=(self.version, *numbers, *texts))


class MessageError(ValueError):
    """A message is not of this protocol."""


def decode_task_info(message: Message) -> TaskInfo:
    """Decode the task in a JOIN message.

    Raises:
        MessageError: it is not one.
    """
    if message.kind is not Kind.JOIN or len(message.arguments) != 8:
        raise MessageError("expected JOIN with eight arguments")
    version, rank, size, local_rank, address, host, python, folder = message.arguments
    if not all(
        text.isdecimal() and text.isascii() and len(text) < 7 for text in (rank, size, local_rank)
    ):
        raise MessageError("a rank is no number")
    return TaskInfo(
        version=version,
        rank=int(rank),
        size=int(size),
        local_rank=int(local_rank),
        address=address,
        host=host,
        python=python,
        folder=folder,
    )


def encode(message: Message) -> list[bytes]:
    """Encode a message as two frames."""
    header: dict[str, object] = {"kind": message.kind.value}
    fields = {"program": message.program, "status": message.status, "arguments": message.arguments}
    header |= {name: value for name, value in fields.items() if value}
    return [json.dumps(header).encode(), message.payload]


def decode(frames: Sequence[bytes | bytearray | memoryview]) -> Message:
    """Decode the message in two frames.

    Raises:
        MessageError: it is not one.
    """
    if len(frames) != 2 or len(frames[0]) > MAX_HEADER_BYTES:
        raise MessageError(f"{len(frames)} frames, expected a header and bytes")
    try:
        header = json.loads(bytes(frames[0]))
        kind = Kind(header["kind"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise MessageError("the header is not a message") from error
    arguments = header.get("arguments", [])
    if not isinstance(arguments, list) or not all(isinstance(text, str) for text in arguments):
        raise MessageError("arguments are not texts")
    return Message(
        kind=kind,
        program=_whole(header, "program"),
        status=_whole(header, "status"),
        arguments=tuple(arguments),
        payload=bytes(frames[1]),
    )


def _whole(header: Mapping[str, object], name: str) -> int:
    value = header.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 31:
        raise MessageError(f"{name} is not a whole number")
    return value
