"""What strangers do to a port: a table of attacks, as the bytes of each connection."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ps_server.transport.authenticator import USERNAME

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
"""Of ZeroMQ's protocol, with the mechanism of encrypted connections."""
IN_CLEAR = GREETING.replace(b"PLAIN", b"NULL\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
NAMED = READY.replace(b"\x04\x1c", b"\x04\x2a") + b"\x08Identity\x00\x00\x00\x01x"
HUGE = b"\x02" + struct.pack("!Q", 2**40)
"""The head of a frame of a TiB."""


def hello(password: bytes) -> bytes:
    """Return ZeroMQ's command that begins a handshake."""
    body = b"\x05HELLO" + bytes([len(USERNAME)]) + USERNAME + bytes([len(password)]) + password
    return b"\x04" + bytes([len(body)]) + body


ATTACKS: dict[str, bytes] = {
    "silence": b"",
    "half a greeting": GREETING[:12],
    "half a handshake": GREETING + hello(b"x" * 96)[:30],
    "a handshake without a key": GREETING + hello(os.urandom(96)),
    "a greeting in clear": IN_CLEAR + READY,
    "a huge command": GREETING + b"\x06" + struct.pack("!Q", 2**40),
    "a huge message": IN_CLEAR + READY + HUGE,
    "one name for all": IN_CLEAR + NAMED + b"\x00\x01x" * 300,
    "noise": os.urandom(512),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    "a long line": b"x" * 200_000,
}
"""What each connection sends; it then stays."""


class Flood:
    """Holds connections to a port as long as it runs: a new one for each that ends.

    Args:
        port: on loopback.
        count: of connections.
        says: what each sends.
    """

    def __init__(self, port: int, count: int, says: bytes) -> None:
        self._port = port
        self._says = says
        self._held: list[socket.socket] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Begin one more connection; where the port takes none now, there is one less."""
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", self._port))
        self._held.append(connection)
        if len(self._held) % 16 == 0:
            time.sleep(0.001)  # lets connections come about
            for each in self._held[-16:]:
                with contextlib.suppress(OSError):
                    each.send(self._says)

    def reset(self) -> None:
        """End all at once, with a reset."""
        for each in self._held:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        self._held.clear()


@contextlib.contextmanager
def flooded(port: int, count: int, says: bytes) -> Iterator[Flood]:
    """Hold connections for the length of a block."""
    flood = Flood(port, count, says)
    try:
        yield flood
    finally:
        flood.reset()


def files_of(process: int) -> int:
    """Return how many files a process has open."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))
