"""Name resolution with a time limit, TCP connections by name, and the addresses at which hosts
reach each other.

Law: the system's resolver has no timeout and cannot be interrupted, so each lookup has a thread of
its own, which is left behind when it does not answer in time: it ends with the resolver's own
timeout, or with this process.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from poseidon.cluster.machinefile import is_loopback
from poseidon.errors import JobError

Address = tuple[socket.AddressFamily, Any]
"""A family and what its sockets connect to: a tuple that begins with the address."""
_Answers = queue.Queue[list[Address] | Exception]

ANY_PORT = 9  # of a UDP socket that never sends
PAUSE_S = 1.0
LEAST_S = 0.5
"""The least time for a lookup, however little is left."""
# Packets to here take the default route; the address is for documentation only (RFC 5737).
DEFAULT_ROUTE = "192.0.2.1"


class NameTimeoutError(TimeoutError):
    """A name was not resolved in time."""


def look_up(name: str, port: int, timeout_s: float) -> list[Address]:
    """Return the addresses of a name, best first.

    Args:
        name: a host's name or address.
        port: of the addresses.
        timeout_s: how long to wait for the resolver.

    Raises:
        NameTimeoutError: it has not answered by then.
        OSError: the name is not known, or is not a legal one.
    """
    return _answer(_ask(name, port), timeout_s)


def addresses_of(names: Iterable[str], timeout_s: float) -> dict[str, tuple[str, ...]]:
    """Return the addresses of those names that the resolver knows and returns in time; look all
    up in parallel.

    Args:
        names: hosts' names or addresses.
        timeout_s: limit of the whole.
    """
    deadline_s = time.monotonic() + timeout_s
    lookups = {name: _ask(name, 0) for name in names}
    found = {}
    for name, answers in lookups.items():
        with suppress(OSError):
            addresses = _answer(answers, deadline_s - time.monotonic())
            found[name] = tuple(str(address[0]) for _, address in addresses)
    return found


def dial(name: str, port: int, timeout_s: float) -> socket.socket:
    """Connect over TCP to the first address of a name that answers; each gets an equal part of
    the time that is left.

    Args:
        name: a host's name or address.
        port: to connect to.
        timeout_s: limit of the whole.

    Raises:
        NameTimeoutError: the resolver has not answered in time.
        OSError: the name is not known, or none of its addresses answers: the error of the last one.
    """
    deadline_s = time.monotonic() + timeout_s
    addresses = look_up(name, port, timeout_s)
    failure: OSError = socket.gaierror(socket.EAI_NONAME, "it has no address")
    for number, (family, address) in enumerate(addresses):
        part_s = (deadline_s - time.monotonic()) / (len(addresses) - number)
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.001, part_s))
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def address_of(name: str, timeout_s: float) -> str:
    """Return the address of a name; look it up again until it is known, since a pod's name
    appears with the pod.

    Raises:
        JobError: the name is not known in time.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return str(look_up(name, 0, max(LEAST_S, until_s - time.monotonic()))[0][1][0])
        except OSError as error:
            if time.monotonic() > until_s:
                raise JobError(
                    f"the host of rank 0, MASTER_ADDR={name}, is not known: "
                    f"{error.strerror or error}"
                ) from error
            time.sleep(PAUSE_S)


def own_address_towards(address: str) -> str:
    """Return this machine's address on the route to another.

    Raises:
        JobError: there is no route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise JobError(f"there is no route to rank 0 at {address}: {error.strerror}") from error
        return str(probe.getsockname()[0])


def address_for_all(name: str, address: str) -> str:
    """Return the address at which every task reaches rank 0, which listens there.

    Args:
        name: MASTER_ADDR.
        address: what it resolves to here; on many systems their own name resolves to a loopback
            address, which tasks on other hosts cannot reach.
    """
    if not is_loopback(address) or is_loopback(name):
        return address
    try:
        return own_address_towards(DEFAULT_ROUTE)
    except JobError:
        return address  # a machine without a network


def _ask(name: str, port: int) -> _Answers:
    """Start a lookup; the result comes through the queue."""
    answers: _Answers = queue.Queue(1)

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            answers.put([(entry[0], entry[4]) for entry in found])
        except UnicodeError:
            answers.put(socket.gaierror(socket.EAI_NONAME, "it cannot be a name"))
        except Exception as error:  # noqa: BLE001 - the caller, which waits for the answer, raises it
            answers.put(error)

    threading.Thread(target=ask, name=f"name lookup {name}", daemon=True).start()
    return answers


def _answer(answers: _Answers, timeout_s: float) -> list[Address]:
    try:
        answer = answers.get(timeout=max(0.0, timeout_s))
    except queue.Empty as error:
        raise NameTimeoutError("the name server does not answer") from error
    if isinstance(answer, Exception):
        raise answer
    return answer
