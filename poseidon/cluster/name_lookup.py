"""What a host's name means, within a time limit, and a connection to what it means.

Law: the system's resolver can neither be given a limit nor be interrupted, so it is asked on a thread of its own, which is left
behind when it does not answer in time: it ends with the resolver's own patience, or with this process.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

Address = tuple[socket.AddressFamily, Any]
"""A family and what its sockets connect to: a tuple that begins with the address."""
_Answers = queue.Queue[list[Address] | OSError]


class NameTimeoutError(TimeoutError):
    """What a name means was not learnt in time."""


def look_up(name: str, port: int, timeout_s: float) -> list[Address]:
    """The addresses of a name, best first.

    Args:
        name: a host's name or address.
        port: of the addresses.
        timeout_s: how long to wait for the resolver.

    Raises:
        NameTimeoutError: it has not answered by then.
        OSError: the name is not known, or is no name.
    """
    return _answer(_ask(name, port), timeout_s)


def addresses_of(names: Iterable[str], timeout_s: float) -> dict[str, tuple[str, ...]]:
    """The addresses of those names that the resolver knows and tells in time; all are asked for at once.

    Args:
        names: hosts' names or addresses.
        timeout_s: limit of the whole.
    """
    deadline_s = time.monotonic() + timeout_s
    asked = {name: _ask(name, 0) for name in names}
    found = {}
    for name, answers in asked.items():
        with suppress(OSError):
            addresses = _answer(answers, deadline_s - time.monotonic())
            found[name] = tuple(str(place[0]) for _, place in addresses)
    return found


def dial(name: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP connection to the first address of a name that answers; each has an equal part of the time that is left.

    Args:
        name: a host's name or address.
        port: where it listens.
        timeout_s: limit of the whole.

    Raises:
        NameTimeoutError: the resolver has not answered in time.
        OSError: the name is not known, or none of its addresses answers; of these, what the last one met.
    """
    deadline_s = time.monotonic() + timeout_s
    addresses = look_up(name, port, timeout_s)
    met: OSError = socket.gaierror(socket.EAI_NONAME, "it has no address")
    for number, (family, place) in enumerate(addresses):
        part_s = (deadline_s - time.monotonic()) / (len(addresses) - number)
        line = socket.socket(family, socket.SOCK_STREAM)
        try:
            line.settimeout(max(0.001, part_s))
            line.connect(place)
        except OSError as error:
            line.close()
            met = error
        else:
            return line
    raise met


def _ask(name: str, port: int) -> _Answers:
    """Ask the resolver; what it says comes through the queue."""
    answers: _Answers = queue.Queue(1)

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            answers.put([(entry[0], entry[4]) for entry in found])
        except OSError as error:
            answers.put(error)
        except UnicodeError:
            answers.put(socket.gaierror(socket.EAI_NONAME, "it cannot be a name"))

    threading.Thread(target=ask, name=f"name lookup {name}", daemon=True).start()
    return answers


def _answer(answers: _Answers, timeout_s: float) -> list[Address]:
    try:
        answer = answers.get(timeout=max(0.0, timeout_s))
    except queue.Empty as error:
        raise NameTimeoutError("the name server does not answer") from error
    if isinstance(answer, OSError):
        raise answer
    return answer
