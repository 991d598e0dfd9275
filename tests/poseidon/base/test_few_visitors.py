"""Connections of anybody: few at a time, and only for a while."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from poseidon.base.few_visitors import FewVisitors
from tests.support.polling import until

WAIT_S = 30.0


def echo(connection: socket.socket, keep: Callable[[], None]) -> None:
    """Answer what comes; `keep` at a peer that asks for it."""
    while said := connection.recv(100):
        if said == b"keep":
            keep()
        if said == b"fail":
            raise ConnectionError("as asked")
        connection.sendall(said)


@pytest.mark.parametrize(
    ("says", "ends"), [(b"hello", [True, True, False, False]), (b"keep", [False] * 4)]
)
def test_the_oldest_connection_ends_unless_its_peer_is_known(says: bytes, ends: list[bool]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    visitors = FewVisitors(listener, echo, name="test-visitors", most=2, longest_s=WAIT_S)
    links = []
    try:
        for _ in range(4):
            link = socket.create_connection(address, timeout=WAIT_S)
            link.sendall(says)
            assert link.recv(100) == says
            links.append(link)
        found = []
        for link in links:
            try:
                link.sendall(b"again")
                found.append(link.recv(100) == b"")
            except OSError:
                found.append(True)
        assert found == ends
    finally:
        for link in links:
            link.close()
        visitors.close()
        visitors.close()


def test_an_error_ends_that_connection_and_time_ends_each() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    visitors = FewVisitors(listener, echo, name="test-visitors", longest_s=0.2)
    try:
        with socket.create_connection(address, timeout=WAIT_S) as link:
            link.sendall(b"fail")
            assert link.recv(100) == b""
        with socket.create_connection(address, timeout=WAIT_S) as link:
            assert link.recv(100) == b""
    finally:
        visitors.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address, timeout=WAIT_S).close()
    until(
        lambda: all(each.name != "test-visitors" for each in threading.enumerate()),
        "a thread is left",
        WAIT_S,
    )
