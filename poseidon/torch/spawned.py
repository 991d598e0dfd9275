"""A process that a script under `poseidon run --ddp` has started itself, and that takes the place of
a worker of the job when it calls `init_process_group`.

The workers' own processes listen (`poseidon.torch.spawning`), each at a socket of its own.
A process asks the worker that has started it for a place. Then it speaks with the launcher through
the worker whose place it takes, in the worker's own protocol.

Law: a process that takes no place behaves as without Poseidon.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch.distributed
import torch.distributed.distributed_c10d

from poseidon.base.settings import place_of_parent, rank_and_size
from poseidon.errors import UsageError

ENDED = (
    "a process calls init_process_group() with rank {rank}, but worker {rank} of the job has "
    "ended its script; expected the same calls in all workers"
)
LEFT = "left"
"""The last event of a process that leaves its place."""
_PLACE = "poseidon.torch.spawned_place:SpawnedWorker"
"""Imported by processes that take a place, and not by the workers of a DataLoader."""
_initialize = torch.distributed.distributed_c10d.init_process_group
_PARAMETERS = signature(_initialize)


def asked_for(*arguments: Any, **named: Any) -> dict[str, int | None]:
    """Return the rank and the size that a call of `init_process_group` asks for; None where no
    argument says it.
    """
    given = _PARAMETERS.bind(*arguments, **named).arguments
    return {"rank": _number(given.get("rank")), "size": _number(given.get("world_size"))}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


class _Joined:
    """The place that this process has taken."""

    def __init__(self) -> None:
        self.pid = 0

    def init_process_group(self, *arguments: Any, **named: Any) -> None:
        """Stand for torch's function of this name."""
        place = place_of_parent()
        if self.pid != os.getpid() and place:
            take_place(place, **asked_for(*arguments, **named))
            self.pid = os.getpid()
        own: Any = self.init_process_group
        current: Any = torch.distributed.init_process_group
        (_initialize if current == own else current)(*arguments, **named)


JOINED = _Joined()


def replace_in_torch() -> None:
    """Let `init_process_group` take a place in the job."""
    _put_into_torch(JOINED.init_process_group)


def _put_into_torch(initialize: Callable[..., None]) -> None:
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        owner.init_process_group = initialize  # type: ignore[attr-defined]


def name_of(token: bytes, rank: int) -> str:
    """Return the name of a worker's socket, which nobody outside of the job can guess."""
    digest = hashlib.sha256(f"place/{rank}/".encode() + token).hexdigest()
    return f"poseidon-{digest[:40]}"


def this_machine() -> str:
    """Return what is equal for processes that reach each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


class Link(NamedTuple):
    """A connection to a worker's place: lines both ways.

    One thread reads, others may write: a text file for both would drop what it has read ahead.
    """

    connection: socket.socket
    reader: TextIO
    writer: TextIO

    @classmethod
    def to(cls, name: str) -> Link:
        """Connect to a place."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{name}")
        except OSError:
            connection.close()
            raise
        return cls.over(connection)

    @classmethod
    def over(cls, connection: socket.socket) -> Link:
        """Return the link over a connection, which it closes."""
        return cls(connection, connection.makefile("r"), connection.makefile("w"))

    def write(self, **fields: object) -> None:
        """Write a line."""
        self.writer.write(json.dumps(fields) + "\n")
        self.writer.flush()

    def read(self) -> dict[str, Any]:
        """Return the next line, which is empty once the other side has closed the connection."""
        fields: dict[str, Any] = json.loads(self.reader.readline() or "{}")
        return fields

    def ask(self, **question: object) -> dict[str, Any]:
        """Write a line, and return the next one."""
        self.write(**question)
        return self.read()

    def end(self) -> None:
        """End the connection, which forks of this process may hold too, and the reads of both
        sides.
        """
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection. No other thread may be reading."""
        self.end()
        self.reader.close()
        with suppress(OSError):
            self.writer.close()
        self.connection.close()


def take_place(parent: str, rank: int | None, size: int | None) -> None:
    """Take the place of a worker, until this process ends. A process whose place another one has
    taken ends here, once that has ended.

    Args:
        parent: the place of the worker that has started this process.
        rank, size: of the workers; None: as the variables of torchrun say.

    Raises:
        UsageError: the job has no such place.
    """
    of_variables = rank_and_size()
    rank = of_variables[0] if rank is None else rank
    size = of_variables[1] if size is None else size
    with closing(Link.to(parent)) as link:
        reply = link.ask(do="place", rank=rank, size=size)
    if "error" in reply:
        raise UsageError(reply["error"])
    if not reply:  # the worker has ended
        os._exit(0)
    try:
        link = Link.to(reply["of"])
    except OSError:
        if reply["do"] == "take":
            raise UsageError(ENDED.format(rank=rank)) from None
        answer = {} if reply["was_taken"] else {"free": True}
    else:
        answer = link.ask(do=reply["do"])
    if "free" in answer:
        raise UsageError(reply["alone"])
    if "document" not in answer:  # the other side has ended
        os._exit(0)
    _put_into_torch(_initialize)  # what is imported now binds it
    pkgutil.resolve_name(_PLACE)(link, answer).enter()
