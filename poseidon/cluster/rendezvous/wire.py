"""What rank 0 and the other tasks of a meeting say to each other: a head of JSON, and bytes.

A task begins with HERE; rank 0 answers WELCOME or LEAVE. From then on rank 0 has programs run by the tasks that lead a host
(START, INPUT, END_INPUT, KILL) and hears of them (OUTPUT, ERRORS, ENDED). Both say ALIVE when they have nothing else to say.

Law: pure; `decode` is the border, and what comes out of it has the types below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

MOST_HEAD_BYTES = 1 << 20


class Kind(Enum):
    """What a message is."""

    HERE = "here"
    """A task has come; `words` are those of its `Arrival`."""
    WELCOME = "welcome"
    """All have come."""
    START = "start"
    """Run the program `words`."""
    INPUT = "input"
    """`payload` for a program's standard input."""
    END_INPUT = "end input"
    """A program's standard input is at its end."""
    KILL = "kill"
    """End a program."""
    OUTPUT = "output"
    """`payload` from a program's standard output."""
    ERRORS = "errors"
    """`payload` from its standard error."""
    ENDED = "ended"
    """A program has ended with `status`; nothing more comes of it."""
    ASKED = "asked"
    """The engine wants the task to end: `words` has the signal's name."""
    LEAVE = "leave"
    """The job is over, and `status` the exit status of every task; `words` may say why."""
    ALIVE = "alive"
    """Still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; fields that its kind does not use are empty.

    Attributes:
        kind: what it is.
        program: which program of this task, 1, 2, ...
        status: an exit status.
        words: argv, or what the kind says.
        payload: bytes of a program's input or output.
    """

    kind: Kind
    program: int = 0
    status: int = 0
    words: tuple[str, ...] = ()
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A task that has come, by its own words.

    Attributes:
        version: of its Poseidon.
        rank: in the job.
        size: the number of tasks that it was told.
        local_rank: on its host.
        address: its own, on the way to rank 0.
        host: its host's name.
        python: its interpreter.
        folder: where it was started.
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
        """What says so."""
        numbers = (str(self.rank), str(self.size), str(self.local_rank))
        places = (self.address, self.host, self.python, self.folder)
        return Message(kind=Kind.HERE, words=(self.version, *numbers, *places))


class WordError(ValueError):
    """A message is none of the above."""


def arrival_in(message: Message) -> Arrival:
    """The arrival that a HERE tells.

    Raises:
        WordError: it tells none.
    """
    if message.kind is not Kind.HERE or len(message.words) != 8:
        raise WordError("expected HERE with eight words")
    version, rank, size, local_rank, address, host, python, folder = message.words
    if not all(text.isdecimal() and text.isascii() and len(text) < 7 for text in (rank, size, local_rank)):
        raise WordError("a rank is no number")
    return Arrival(
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
    """A message as two frames."""
    head: dict[str, object] = {"kind": message.kind.value}
    head |= {name: value for name in ("program", "status", "words") if (value := getattr(message, name))}
    return [json.dumps(head).encode(), message.payload]


def decode(frames: Sequence[bytes | bytearray | memoryview]) -> Message:
    """The message in two frames.

    Raises:
        WordError: there is none.
    """
    if len(frames) != 2 or len(frames[0]) > MOST_HEAD_BYTES:
        raise WordError(f"{len(frames)} frames, expected a head and bytes")
    try:
        head = json.loads(bytes(frames[0]))
        kind = Kind(head["kind"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise WordError("the head is no message") from error
    words = head.get("words", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise WordError("words are texts")
    return Message(
        kind=kind,
        program=_whole(head, "program"),
        status=_whole(head, "status"),
        words=tuple(words),
        payload=bytes(frames[1]),
    )


def _whole(head: Mapping[str, object], name: str) -> int:
    value = head.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 31:
        raise WordError(f"{name} is no whole number")
    return value
