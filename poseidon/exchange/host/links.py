"""The connections among the workers of one host: Unix sockets, with the contract and the messages
of `worker_links.py`.

A message: the sizes of its two frames (8 bytes each, little-endian), the header, the payload. The
first one of a connection is `Join`, with a payload that says what its sender exchanges; worker 0
passes the descriptor of the shared memory with it. The sockets are in a folder that only this user can enter, and their names are removed as soon as
all are connected. A process that dies closes its connections, so the others know at once.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgpack

from poseidon.exchange.worker_links import LEAVE_MESSAGE, VERSION, read_header
from ps_server import PeerLost, RemoteProtocolError, ServerError, StalenessTimeout, TransportError
from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.network import Network
from ps_server.transport.base import Buffer, Frames

SIZES = struct.Struct("<QQ")
RETRY_S = 0.02
READ_BYTES = 256 * 1024
FIRST_BYTES = 16 * 2**20
"""Longest message of a connection before `start`."""
LEAVE_S = 2.0
"""How long `close` tries to send while no message leaves."""


class HostStream:
    """The connection with one other worker."""

    __slots__ = ("outbox", "socket", "unread")

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self.outbox: deque[memoryview] = deque()
        self.unread = bytearray()

    def flush(self) -> bool:
        """Send what the kernel takes; return whether that is all."""
        outbox = self.outbox
        while outbox:
            try:
                sent = self.socket.sendmsg(list(outbox)[:8])
            except BlockingIOError:
                return False
            except OSError:
                outbox.clear()  # what receives from it reports the loss
                return True
            while outbox and sent >= len(outbox[0]):
                sent -= len(outbox.popleft())
            if sent:
                outbox[0] = outbox[0][sent:]
        return True

    def messages(self, data: bytes) -> list[Frames]:
        """Return the messages that end in what has been read."""
        unread, start = self.unread, 0
        unread += data
        found: list[Frames] = []
        while len(unread) - start >= SIZES.size:
            first, second = SIZES.unpack_from(unread, start)
            at = start + SIZES.size
            stop = at + first + second
            if len(unread) < stop:
                break
            found.append([bytes(unread[at : at + first]), unread[at + first : stop]])
            start = stop
        del unread[:start]
        return found


class HostLinks:
    """The connections of one worker to all others of its host.

    Args:
        address: path of the sockets, in a folder that only this user can enter; the same for all
            workers of the host, and of no other job. The folder is made if it does not exist.
        network: the place of this worker among those of its host.
        monitor: guards what is to be sent and what `receive` changes; it fails with the
            connections.
        receive: takes each message of another worker, by its local rank, under the monitor.

    Attributes:
        others: the local ranks of the other workers.
        left: those of them that have left. They answer questions until all have left.
        gone: those whose connections have ended.
    """

    def __init__(
        self,
        address: str,
        network: Network,
        *,
        monitor: Monitor,
        receive: Callable[[int, Frames], None],
    ) -> None:
        self.others = [(network.rank + i) % network.size for i in range(1, network.size)]
        self.left: set[int] = set()
        self.gone: set[int] = set()
        self._leaves = False
        self._address = address
        self._network = network
        self._monitor = monitor
        self._receive = receive
        self._streams: dict[int, HostStream] = {}
        self._selector = selectors.DefaultSelector()
        self._wakers = socket.socketpair()
        for end in self._wakers:
            end.setblocking(False)
        self._thread = threading.Thread(
            target=self._run, name=f"host-links-{network.rank}", daemon=True
        )

    # The handshake.

    def meet(self, hello: bytes, file: int | None) -> tuple[dict[int, bytes], int]:
        """Connect to all others.

        Args:
            hello: what the others get of this worker.
            file: of worker 0, an open file for all others.

        Returns:
            What the others have sent, by local rank; and the file.

        Raises:
            StalenessTimeout: one did not come in time.
            PeerLost: one has gone, or does not belong here.
            TransportError: the folder cannot be used.
            ServerError: the interruption's.
        """
        rank, size = self._network.rank, self._network.size
        deadline = time.monotonic() + self._network.timeout_s
        hellos: dict[int, bytes] = {}
        path = f"{self._address}-{rank}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path), 0o700)
                listener.bind(path)
            except OSError as error:
                raise TransportError(
                    f"cannot listen on {path}: {error.strerror or error}"
                ) from error
            self._network.interruption.on_interrupt(lambda _: _shut(listener))
            try:
                listener.listen(size)
                for other in range(rank):
                    with self._refusing(self._connect(other, deadline)) as stream:
                        self._send_first(stream, hello, file)
                        found, hellos[other], files = self._read_first(stream)
                        self._take(found, stream, expected=range(other, other + 1))
                        file = files[0] if other == 0 and files else file
                while len(self._streams) < size - 1:
                    with self._refusing(self._accept(listener, deadline)) as stream:
                        found, payload, _ = self._read_first(stream)
                        self._take(found, stream, expected=range(rank + 1, size))
                        hellos[found] = payload
                        self._send_first(stream, hello, file if rank == 0 else None)
            except Exception:
                self._network.interruption.check()
                raise
            finally:
                os.unlink(path)
                with contextlib.suppress(OSError):  # the others' names are still in it
                    os.rmdir(os.path.dirname(path))
        if file is None:
            raise RemoteProtocolError(f"{self._network.name(0)} sent no shared memory")
        return hellos, file

    @contextlib.contextmanager
    def _refusing(self, stream: socket.socket) -> Iterator[socket.socket]:
        """Tell the other end why there will be no connection, if the body fails; close it."""
        try:
            yield stream
        except ServerError as error:
            _send_failure(stream, error)
            stream.close()
            raise

    def _take(self, rank: int, stream: socket.socket, *, expected: range) -> None:
        if rank not in expected or rank in self._streams:
            raise PeerLost(
                f"a worker of this machine joined with local rank {rank}, of {self._network.size} "
                "workers; all must be workers of one job"
            )
        self._streams[rank] = HostStream(stream)
        self._network.interruption.on_interrupt(lambda _: _shut(stream))

    def _connect(self, other: int, deadline: float) -> socket.socket:
        path = f"{self._address}-{other}"
        while True:
            self._network.interruption.check()
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                stream.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                stream.close()
            except OSError as error:
                stream.close()
                raise TransportError(
                    f"cannot connect to {path}: {error.strerror or error}"
                ) from error
            else:
                if _user_of(stream) != os.getuid():
                    stream.close()
                    raise TransportError(f"another user of this machine listens at {path}")
                stream.settimeout(self._network.timeout_s)
                return stream
            if time.monotonic() > deadline:
                raise StalenessTimeout(
                    f"{self._network.name(other)} did not listen at {path} within "
                    f"{self._network.timeout_s:g} s"
                )
            time.sleep(RETRY_S)

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        while True:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                stream, _ = listener.accept()
            except TimeoutError as error:
                raise StalenessTimeout(
                    f"not every worker of this machine came within {self._network.timeout_s:g} s"
                ) from error
            if _user_of(stream) == os.getuid():
                stream.settimeout(self._network.timeout_s)
                return stream
            stream.close()  # another user, where the folder is open to others

    def _send_first(self, stream: socket.socket, payload: bytes, file: int | None) -> None:
        network = self._network
        header = msgpack.packb([VERSION, "Join", network.rank, network.size, network.token])
        with _translated():
            data = _framed(header, payload)
            sent = 0 if file is None or network.rank else socket.send_fds(stream, [data], [file])
            if sent < len(data):  # the other may have refused and closed already
                stream.sendall(data[sent:])

    def _read_first(self, stream: socket.socket) -> tuple[int, bytes, list[int]]:
        with _translated():
            data, files, _, _ = socket.recv_fds(stream, SIZES.size, 1)
            data += _exactly(stream, SIZES.size - len(data))
            sizes = SIZES.unpack(data)
            if sum(sizes) > FIRST_BYTES:
                raise RemoteProtocolError("a worker of this machine sent a hello that is too long")
            header, payload = (_exactly(stream, size) for size in sizes)
        match read_header(header):
            case [_, "Join", int(rank), int(size), bytes(token)]:
                if not hmac.compare_digest(token, self._network.token):
                    raise RemoteProtocolError("a process of this machine is not of this job")
                if size != self._network.size:
                    raise PeerLost(
                        f"the worker with local rank {rank} expects {size} workers on this "
                        f"machine, but {self._network.name(self._network.rank)} expects {self._network.size}"
                    )
                return rank, payload, files
            case [_, "Failed"]:
                raise PeerLost(payload.decode(errors="replace"))
            case _:
                raise RemoteProtocolError("a worker of this machine did not join")

    # The contract of links.

    def start(self) -> None:
        """Let messages move, once all have met."""
        for rank, stream in self._streams.items():
            stream.socket.setblocking(False)
            self._selector.register(stream.socket, selectors.EVENT_READ, rank)
        self._selector.register(self._wakers[1], selectors.EVENT_READ, None)
        self._thread.start()

    def send(self, ranks: Sequence[int], priority: int, frames: Sequence[Buffer]) -> None:
        """Send a message to some others; returns at once. Called under the monitor.

        The payload must not be written to until it is certain that every receiver has it.

        Args:
            priority: ignored: messages keep their order.
            frames: two.
        """
        self._monitor.check()
        self._send(ranks, frames)

    def _send(self, ranks: Sequence[int], frames: Sequence[Buffer]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        head = SIZES.pack(*(len(view) for view in views))
        for rank in ranks:
            stream = self._streams.get(rank)
            if stream is None or rank in self.gone:
                continue
            is_first = not stream.outbox
            stream.outbox += [memoryview(head), *(view for view in views if len(view))]
            if is_first and not stream.flush():
                self.wake()

    def wake(self) -> None:
        """Make the thread look at what is to be sent."""
        with contextlib.suppress(OSError):
            self._wakers[0].send(b"\0")

    def fail(self, error: ServerError) -> None:
        """Tell the others why this worker cannot continue, and make every call raise `error`."""
        with self._monitor:
            if self._monitor.failure is None and not self._monitor.closed:
                reason = str(error).encode(errors="backslashreplace")
                self._send(self.others, [msgpack.packb([VERSION, "Failed"]), reason])
            self._monitor.fail(error)

    def refuse(self, error: ServerError) -> None:
        """Tell those that are connected why there will be no exchange, in place of `start`."""
        for stream in self._streams.values():
            _send_failure(stream.socket, error)
        self.close()

    def leave(self) -> None:
        """Leave, and wait until all others have left, or something has failed."""
        with self._monitor:
            if self._leaves or self._monitor.failure is not None or self._thread.ident is None:
                return
            self._leaves = True
            self._send(self.others, [*LEAVE_MESSAGE, b""])
        with contextlib.suppress(ServerError):
            self._monitor.wait_for(
                lambda: True if self.left | self.gone >= {*self.others} else None,
                "the other workers of this machine have not left",
                limited=False,
            )

    def close(self) -> None:
        """Send what is queued, and disconnect. Safe to call twice."""
        with self._monitor:
            if not self._leaves and self._thread.ident is not None and not self._monitor.closed:
                self._leaves = True
                self._send(self.others, [*LEAVE_MESSAGE, b""])
            if self._monitor.interrupted:
                for stream in self._streams.values():
                    stream.outbox.clear()
            self._monitor.close()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()
        for end in (*(stream.socket for stream in self._streams.values()), *self._wakers):
            end.close()
        self._selector.close()

    # The thread.

    def _run(self) -> None:
        give_up_s = float("inf")
        try:
            while not self._may_end(give_up_s):
                if self._monitor.closed:
                    give_up_s = min(give_up_s, time.monotonic() + LEAVE_S)
                for key, events in self._selector.select(0.1 if self._monitor.closed else None):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._wakers[1].recv(READ_BYTES)
                    elif events & selectors.EVENT_READ:
                        self._read(key.data)
                self._write()
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: its owner raises the error
            self.fail(as_server_error(error, "the connections on this machine failed"))

    def _may_end(self, give_up_s: float) -> bool:
        with self._monitor:
            has_sent = not any(stream.outbox for stream in self._streams.values())
            if not self._monitor.closed:
                return self._monitor.failure is not None and has_sent
            return has_sent or time.monotonic() > give_up_s

    def _write(self) -> None:
        """Send what waits, and look at those sockets that take no more."""
        with self._monitor:
            for rank, stream in self._streams.items():
                if rank in self.gone:
                    continue
                waits = not stream.flush()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
                if self._selector.get_key(stream.socket).events != events:
                    self._selector.modify(stream.socket, events, rank)

    def _read(self, rank: int) -> None:
        stream = self._streams[rank]
        try:
            data = stream.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(stream.socket)
            with self._monitor:
                self.gone.add(rank)
                stream.outbox.clear()
                self._monitor.notify()
                if rank not in self.left and not self._monitor.closed:
                    raise PeerLost(f"{self._network.name(rank)}, on this machine, has gone")
            return
        if messages := stream.messages(data):
            with self._monitor:
                for frames in messages:
                    self._handle(rank, frames)
                self._monitor.notify()

    def _handle(self, rank: int, frames: Frames) -> None:
        match read_header(frames[0]):
            case [_, "Leave"]:
                self.left.add(rank)
            case [_, "Failed"]:
                raise PeerLost(bytes(frames[1]).decode(errors="replace"))
            case _:
                self._receive(rank, frames)


def _send_failure(stream: socket.socket, error: ServerError) -> None:
    reason = str(error).encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.sendall(_framed(msgpack.packb([VERSION, "Failed"]), reason))


def _framed(header: bytes, payload: bytes) -> bytes:
    return SIZES.pack(len(header), len(payload)) + header + payload


def _exactly(stream: socket.socket, length: int) -> bytes:
    found = bytearray(length)
    view, got = memoryview(found), 0
    while got < length:
        count = stream.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return bytes(found)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise PeerLost("a worker of this machine has gone") from error
    except OSError as error:
        raise PeerLost(
            f"a worker of this machine does not answer: {error.strerror or error}"
        ) from error


def _shut(stream: socket.socket) -> None:
    """End every call that waits for the other side."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _user_of(stream: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel reports it."""
    _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
