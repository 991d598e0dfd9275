"""A listening socket for anybody: a few connections at a time, each on a thread, so that strangers
take neither the files nor the threads of the process.

Law: when a connection comes while `most` are open, the oldest ends. A connection lasts at most
`longest_s`. An error of a connection ends only that connection. If the process can open no more
files, the oldest connection ends. The listener accepts until `close`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

MOST = 8
LONGEST_S = 5.0
PAUSE_S = 0.02
"""Between two connections while all places are taken: a flood costs little of a processor."""


class FewVisitors:
    """Serves the connections of a listening socket.

    Args:
        listener: owned from here on.
        serve: called on a thread for each connection, which is closed when it returns. Its calls
            raise OSError once the connection has ended. The second argument is a function to call
            once the peer has shown that it is no stranger: the connection then lasts as long as it
            likes, and takes no place.
        name: of the threads.
        most: connections at a time.
        longest_s: seconds that a connection lasts.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket, Callable[[], None]], None],
        *,
        name: str,
        most: int = MOST,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._name = name
        self._most = most
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._open: dict[socket.socket, float] = {}
        """When each connection came, oldest first."""
        self._closing = False
        listener.settimeout(longest_s / 4)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all. Safe to call twice."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends an `accept` that waits
        self._thread.join()
        with self._changed:
            for connection in self._open:
                _end(connection)

    def _run(self) -> None:
        with self._listener:
            while not self._closing:
                connection = self._accept()
                self._end_late()
                if connection is not None:
                    self._admit(connection)

    def _accept(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except TimeoutError:
            return None
        except OSError:  # it has gone again, or no more files can be opened
            if not self._closing:
                self._end_oldest()
                time.sleep(PAUSE_S)
            return None

    def _admit(self, connection: socket.socket) -> None:
        with self._changed:
            if len(self._open) >= self._most:
                self._end_oldest()
                self._changed.wait_for(lambda: len(self._open) < self._most, self._longest_s)
                time.sleep(PAUSE_S)
            self._open[connection] = time.monotonic()
        try:
            connection.settimeout(self._longest_s)
            threading.Thread(
                target=self._visit, args=(connection,), name=self._name, daemon=True
            ).start()
        except (OSError, RuntimeError):  # no thread can be started
            self._forget(connection)

    def _keep(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.pop(connection, None)
            self._changed.notify_all()

    def _visit(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(connection, lambda: self._keep(connection))
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._keep(connection)
        connection.close()

    def _end_late(self) -> None:
        with self._changed:
            for connection, came_s in self._open.items():
                if time.monotonic() - came_s > self._longest_s:
                    _end(connection)

    def _end_oldest(self) -> None:
        with self._changed:
            for connection in list(self._open)[:1]:
                _end(connection)


def _end(connection: socket.socket) -> None:
    """Make the thread that serves a connection return."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
