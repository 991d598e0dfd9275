"""Sockets between the processes of one simulated host: they keep all they are given, in order, and
are closed when a process dies. They stand for the modules `socket` and `selectors`.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.simulation.launcher import Primitives
from tests.simulation.processes import STEP_S, Process


class UnixSockets:
    """The sockets of a run.

    Args:
        primitives: of the run.
    """

    AF_UNIX, SOCK_STREAM, SHUT_RDWR = socket.AF_UNIX, socket.SOCK_STREAM, socket.SHUT_RDWR
    SOL_SOCKET, SO_SNDTIMEO = socket.SOL_SOCKET, socket.SO_SNDTIMEO
    SO_PEERCRED = socket.SO_PEERCRED

    def __init__(self, primitives: Primitives) -> None:
        self.primitives = primitives
        self.listening: dict[str, SimulatedSocket] = {}

    def socket(self, family: int, kind: int) -> SimulatedSocket:
        """See `socket.socket`."""
        return SimulatedSocket(self, self.primitives.current)

    def socketpair(self) -> tuple[SimulatedSocket, SimulatedSocket]:
        """See `socket.socketpair`."""
        one, other = self.socket(0, 0), self.socket(0, 0)
        one.peer, other.peer = other, one
        return one, other

    @staticmethod
    def send_fds(stream: SimulatedSocket, buffers: Sequence[bytes], files: Sequence[int]) -> int:
        """See `socket.send_fds`."""
        assert stream.peer is not None
        stream.peer.files += [os.dup(file) for file in files]
        return stream.send(b"".join(buffers))

    @staticmethod
    def recv_fds(
        stream: SimulatedSocket, size: int, most: int
    ) -> tuple[bytes, list[int], int, None]:
        """See `socket.recv_fds`."""
        found = bytearray(size)
        del found[stream.recv_into(memoryview(found)) :]
        files, stream.files = stream.files, []
        return bytes(found), files, 0, None


class SimulatedSocket:
    """See `socket.socket`.

    Args:
        sockets: of the run.
        process: that has it.

    Attributes:
        peer: the other end; None: it is not connected.
        files: that have come.
    """

    def __init__(self, sockets: UnixSockets, process: Process) -> None:
        self._sockets = sockets
        self._process = process
        self._inbox = bytearray()
        self._waiting: deque[SimulatedSocket] = deque()
        self._address = ""
        self._timeout_s: float | None = None
        self._shut = self._ended = False
        self.peer: SimulatedSocket | None = None
        self.files: list[int] = []
        process.on_death.append(lambda silent: self.close())

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settimeout(self, seconds: float | None) -> None:
        """See `socket.socket`."""
        self._timeout_s = seconds

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """See `socket.socket`."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """See `socket.socket`."""
        return struct.pack("3i", 1, os.getuid(), 0)

    def bind(self, address: str) -> None:
        """See `socket.socket`."""
        try:
            Path(address).touch(exist_ok=False)
        except FileExistsError as error:
            raise OSError(errno.EADDRINUSE, "Address already in use") from error
        self._address = address

    def listen(self, most: int) -> None:
        """See `socket.socket`."""
        self._sockets.listening[self._address] = self

    def accept(self) -> tuple[SimulatedSocket, str]:
        """See `socket.socket`."""
        wait = self._sockets.primitives.wait
        if not wait(lambda: self._waiting or self._shut, self._timeout_s):
            raise TimeoutError
        if self._shut:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self._waiting.popleft(), ""

    def connect(self, address: str) -> None:
        """See `socket.socket`."""
        if not Path(address).exists():
            raise FileNotFoundError(address)
        listener = self._sockets.listening.get(address)
        if listener is None:
            raise ConnectionRefusedError(address)
        far = SimulatedSocket(self._sockets, listener._process)
        self.peer, far.peer = far, self
        listener._waiting.append(far)
        listener._wake()

    def setblocking(self, blocks: bool) -> None:
        """See `socket.socket`."""
        self._timeout_s = None if blocks else 0.0

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """See `socket.socket`."""
        self.sendall(data)
        return len(data)

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """See `socket.socket`."""
        return self.send(b"".join(buffers))

    def recv(self, size: int) -> bytes:
        """See `socket.socket`."""
        if self._timeout_s == 0.0 and not self.is_readable:
            raise BlockingIOError
        found = bytearray(size)
        return bytes(found[: self.recv_into(memoryview(found))])

    @property
    def is_readable(self) -> bool:
        """Whether `recv` does not wait."""
        return bool(self._inbox or self._waiting) or self._ended or self._shut

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """See `socket.socket`."""
        peer = self.peer
        if peer is None or self._shut or peer._shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        peer._inbox += data
        peer._wake()

    def recv_into(self, view: memoryview) -> int:
        """See `socket.socket`."""
        wait = self._sockets.primitives.wait
        if not wait(lambda: self.is_readable, self._timeout_s):
            raise TimeoutError
        count = min(len(view), len(self._inbox))
        view[:count] = self._inbox[:count]
        del self._inbox[:count]
        return count

    def shutdown(self, how: int) -> None:
        """See `socket.socket`."""
        if self._shut:
            return
        self._shut = True
        self._sockets.listening.pop(self._address, None)
        self._wake()
        if self.peer is not None:
            self.peer._ended = True
            self.peer._wake()
        for waiting in self._waiting:
            waiting.close()

    def close(self) -> None:
        """See `socket.socket`."""
        self.shutdown(socket.SHUT_RDWR)
        while self.files:
            os.close(self.files.pop())

    def _wake(self) -> None:
        self._process.changed = True
        self._process.world.after(STEP_S, self._process.ask_all)


class SimulatedSelectors:
    """The module `selectors`, for simulated sockets, which can always be written to.

    Args:
        primitives: of the run.
    """

    EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives

    def DefaultSelector(self) -> SimulatedSelector:
        """See `selectors.DefaultSelector`."""
        return SimulatedSelector(self._primitives)


class SimulatedSelector:
    """See `selectors.BaseSelector`."""

    def __init__(self, primitives: Primitives) -> None:
        self._primitives = primitives
        self._keys: dict[SimulatedSocket, selectors.SelectorKey] = {}

    def register(self, stream: SimulatedSocket, events: int, data: object) -> None:
        """See `selectors.BaseSelector`."""
        self._keys[stream] = selectors.SelectorKey(stream, 0, events, data)  # type: ignore[arg-type]

    modify = register

    def unregister(self, stream: SimulatedSocket) -> None:
        """See `selectors.BaseSelector`."""
        del self._keys[stream]

    def get_map(self) -> Mapping[SimulatedSocket, selectors.SelectorKey]:
        """See `selectors.BaseSelector`."""
        return self._keys

    def get_key(self, stream: SimulatedSocket) -> selectors.SelectorKey:
        """See `selectors.BaseSelector`."""
        return self._keys[stream]

    def select(self, timeout_s: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`."""

        def ready() -> list[tuple[selectors.SelectorKey, int]]:
            return [
                (key, events)
                for stream, key in self._keys.items()
                if (events := key.events & (self._readable(stream) | selectors.EVENT_WRITE))
            ]

        self._primitives.wait(ready, timeout_s)
        return ready()

    @staticmethod
    def _readable(stream: SimulatedSocket) -> int:
        return selectors.EVENT_READ if stream.is_readable else 0

    def close(self) -> None:
        """See `selectors.BaseSelector`."""
        self._keys.clear()
