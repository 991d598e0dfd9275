"""A TCP relay that records the bytes of its connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Relays connections to `address` to a listening socket.

    Args:
        target: `tcp://host:port`.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self.there = bytearray()
        """Bytes sent to the target."""
        self.back = bytearray()
        """Bytes received from the target."""
        self._start(self._accept)

    @property
    def address(self) -> str:
        """The address to connect to."""
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Cut all connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(60)

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="relay", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._start(self._pass, near, far, self.there)
                self._start(self._pass, far, near, self.back)
        except OSError:
            return

    def _pass(self, source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while piece := source.recv(1 << 16):
                kept += piece
                target.sendall(piece)
        except OSError:
            return
