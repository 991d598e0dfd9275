"""The `Wire` among the workers of one host: Unix sockets.

Each worker listens at a path of its own, and connects to the paths of all others. A message: the
sizes of its two frames (8 bytes each, little-endian; the second is `NO_FRAME` where it has one
frame), and the frames. The kernel gets it from the thread that sends it, as far as it takes it.

Worker 0 passes the descriptor of the shared memory with its first bytes. The sockets are in a folder
that only this user can enter, and their names are removed as soon as all are connected. A process
that dies closes its connections, so the others know at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

from ps_server import TransportError
from ps_server.keys import Keyring
from ps_server.transport.base import Frames

SIZES = struct.Struct("<QQ")
NO_FRAME = 2**64 - 1
RETRY_S = 0.02
READ_BYTES = 256 * 1024
MOST_WORKERS = 1024


class HostStream:
    """The connection with one other worker, in one direction."""

    __slots__ = ("file", "is_tried", "is_watched", "outbox", "path", "socket", "unread")

    def __init__(self, path: str = "", file: int | None = None) -> None:
        self.path, self.file = path, file  # where it connects to, and what its first bytes bring
        self.socket: socket.socket | None = None
        self.is_tried = False  # whether it could not be connected since the last message
        self.is_watched = False  # whether the thread waits until the kernel takes more
        self.outbox: deque[memoryview] = deque()
        self.unread = bytearray()

    def flush(self) -> bool:
        """Send what the kernel takes; return whether that is all."""
        outbox = self.outbox
        while outbox and self.socket is not None:
            try:
                sent = self.socket.sendmsg(list(outbox)[:8])
            except BlockingIOError:
                return False
            except OSError:
                outbox.clear()  # what receives reports the loss
                return True
            while outbox and sent >= len(outbox[0]):
                sent -= len(outbox.popleft())
            if sent:
                outbox[0] = outbox[0][sent:]
        return not outbox

    def messages(self, data: bytes) -> list[Frames]:
        """Return the messages that end in what has been read."""
        unread, start = self.unread, 0
        unread += data
        found: list[Frames] = []
        while len(unread) - start >= SIZES.size:
            first, second = SIZES.unpack_from(unread, start)
            at = start + SIZES.size
            stop = at + first + (0 if second == NO_FRAME else second)
            if len(unread) < stop:
                break
            header = bytes(unread[at : at + first])
            found.append([header] if second == NO_FRAME else [header, unread[at + first : stop]])
            start = stop
        del unread[:start]
        return found


class UnixWire:
    """See `Wire`; both ends of one worker, too.

    Args:
        path: where it listens, in a folder that only this user can enter; of no other job. The
            folder is made if it does not exist.
        file: of worker 0, an open file for all others. `close` closes it.

    Attributes:
        file: the same; on others None until a message of worker 0 has come.
        connections: of others to this worker.
        lost: the others that have closed their ends, by place.
    """

    near = True
    refused = 0

    def __init__(self, path: str, file: int | None = None) -> None:
        self.address = path
        self.file = file
        self.connections = 0
        self.lost: set[int] = set()
        self._sending: list[HostStream] = []
        self._names = count()
        self._lock = threading.Lock()  # of what is to be sent
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wakers = socket.socketpair()
        for end in self._wakers:
            end.setblocking(False)
        self._listens = self._is_closed = False

    def listen(self, host: str, keys: Keyring | None) -> UnixWire:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(self.address), 0o700)
            self._listener.bind(self.address)
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise TransportError(f"cannot listen on {self.address}: {reason}") from error
        self._listens = True
        self._listener.listen(MOST_WORKERS)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakers[1], selectors.EVENT_READ, self._clear_wakes)
        return self

    def connect(self, addresses: Sequence[str], keys: Keyring | None) -> UnixWire:
        self._sending = [HostStream(path, self.file) for path in addresses]
        return self

    def now(self) -> float:
        return time.monotonic()

    def admit_no_more(self) -> None:
        if self._listens:
            self._listens = False
            self._selector.unregister(self._listener)
            self._listener.close()
            with contextlib.suppress(OSError):  # the others' names are still in it
                os.unlink(self.address)
                os.rmdir(os.path.dirname(self.address))

    def known(self, peer: bytes) -> None:
        pass

    def done_with(self, shard: int) -> None:
        pass

    def blocks(self, peer: Any) -> bool:
        return False

    def send(self, peer: Any, frames: Frames) -> bool:
        """Send to a worker, by place; what the kernel does not take waits here."""
        views = [memoryview(frame).cast("B") for frame in frames]
        head = SIZES.pack(len(views[0]), len(views[1]) if len(views) > 1 else NO_FRAME)
        with self._lock:
            stream = self._sending[peer]
            if peer in self.lost:
                return True
            stream.is_tried = False
            is_first = not stream.outbox
            stream.outbox += [memoryview(head), *(view for view in views if len(view))]
            waits = is_first and not stream.flush()
        if waits:
            self.wake()
        return True

    def unsent(self, shard: int) -> int:
        stream = self._sending[shard]
        return 0 if stream.is_tried else len(stream.outbox)

    def describe_loss(self, shard: int) -> str:
        return f"the connection to {self._sending[shard].path}"

    def receive(self, timeout_s: float) -> list[tuple[Any, Frames]]:
        if not self._send_waiting():
            timeout_s = min(timeout_s, RETRY_S)
        events = self._selector.select(timeout_s)
        ready = [key.data for key, event in events if event & selectors.EVENT_READ]
        calls = [each for each in ready if callable(each)]
        for place in () if calls else ready:  # all that has come is read before an end is
            self._lose(place)
        return [message for call in calls for message in call()]

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wakers[0].send(b"\0")

    def close(self, *, drops: bool = False) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.admit_no_more()
        found = [key.fileobj for key in self._selector.get_map().values()]
        for end in (*found, *self._wakers, self._listener):
            end.close()  # type: ignore[union-attr]
        self._selector.close()
        if self.file is not None:
            os.close(self.file)

    def _send_waiting(self) -> bool:
        """Send what waits, and watch those sockets that take no more; return whether all others
        are connected.
        """
        with self._lock:
            for place, stream in enumerate(self._sending):
                is_there = stream.socket is not None or self._reach(place, stream)
                if is_there and (stream.outbox or stream.is_watched):
                    stream.is_watched = not stream.flush()
                    events = selectors.EVENT_READ
                    events |= selectors.EVENT_WRITE if stream.is_watched else 0
                    assert stream.socket is not None
                    self._selector.modify(stream.socket, events, place)
            return all(stream.socket for stream in self._sending)

    def _reach(self, place: int, stream: HostStream) -> bool:
        """Connect to a worker; return False where it does not listen yet."""
        path, end = stream.path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as failed:
            failed.callback(end.close)
            end.setblocking(False)
            try:
                end.connect(path)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                stream.is_tried = True
                return False
            except OSError as error:
                reason = error.strerror or error
                raise TransportError(f"cannot connect to {path}: {reason}") from error
            if _user_of(end) != os.getuid():
                raise TransportError(f"another user of this machine listens at {path}")
            if stream.file is not None:
                socket.send_fds(end, [stream.outbox.popleft()], [stream.file])
            failed.pop_all()
        stream.socket = end
        stream.is_tried = False
        self._selector.register(end, selectors.EVENT_READ, place)
        return True

    def _lose(self, place: int) -> None:
        with self._lock:
            self.lost.add(place)
            stream = self._sending[place]
            stream.outbox.clear()
            stream.is_watched = False
            assert stream.socket is not None
            self._selector.unregister(stream.socket)
            stream.socket.close()

    def _accept(self) -> Sequence[tuple[Any, Frames]]:
        end, _ = self._listener.accept()
        if _user_of(end) != os.getuid():
            end.close()  # another user, where the folder is open to others
            return ()
        end.setblocking(False)
        self.connections += 1
        name = b"%d" % next(self._names)
        read = partial(self._read, name, HostStream(), end)
        self._selector.register(end, selectors.EVENT_READ, read)
        return ()

    def _read(
        self, name: bytes, stream: HostStream, end: socket.socket
    ) -> Sequence[tuple[Any, Frames]]:
        data = b""
        try:
            if self.file is not None:
                data = end.recv(READ_BYTES)
            else:
                data, files, _, _ = socket.recv_fds(end, READ_BYTES, 1)
                self.file = files[0] if files else None
        except BlockingIOError:
            return ()
        except OSError:
            pass  # it has gone
        if not data:
            self.connections -= 1
            self._selector.unregister(end)
            end.close()
        return [(name, frames) for frames in stream.messages(data)]

    def _clear_wakes(self) -> Sequence[tuple[Any, Frames]]:
        with contextlib.suppress(BlockingIOError):
            self._wakers[1].recv(READ_BYTES)
        return ()


def _user_of(stream: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel reports it."""
    _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
