"""Free ports of this host, for programs that cannot choose one themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return a number of different free ports."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [int(server.getsockname()[1]) for server in servers]


def free_port() -> int:
    """Return one free port."""
    return free_ports(1)[0]
