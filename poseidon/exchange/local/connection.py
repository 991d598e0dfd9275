"""Connections between the workers of one host: small messages over a Unix socket, and files
passed over it.

The leader listens; each follower has one connection to it. A process that dies closes its
connection, so the other side knows at once. The socket's name is removed as soon as all are
connected.

A message: kind (1 byte), tensor (4), number (8), length of the payload (4), little-endian; then the
payload.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ps_server import PeerLost, RemoteProtocolError, ServerError, StalenessTimeout, TransportError
from ps_server.errors import as_server_error
from ps_server.network import Network

HEAD = struct.Struct("<BIQI")
RETRY_S = 0.02
MAX_FILES = 4

Buffer = bytes | bytearray | memoryview


class Kind(Enum):
    """The kinds of messages."""

    HELLO = 1
    """To the leader: worker `number` is connected; the payload names its tensors."""
    WELCOME = 2
    """From the leader: how tensors move; files come with it."""
    PART = 3
    """To the leader: this worker's part of the tensor can be read."""
    FACTORS = 4
    """To the leader: `number` rows of u and then of v are the payload."""
    RELEASED = 5
    """To the leader: the tensor is not used any more in this iteration."""
    TAKEN = 6
    """To the leader: the values after `open` or `settle` are copied."""
    VALUE = 7
    """From the leader: the tensor's next value can be read."""
    SIGNALS = 8
    """From the leader: all requests of rank 0 so far."""
    GATHER = 9
    """To the leader: this worker's payload of collection `number`."""
    GATHERED = 10
    """From the leader: all payloads of collection `number`."""
    HISTORIES = 11
    """From the leader: the history of the tensor; of all tensors, in their order."""
    FAILED = 12
    """Either way: the sender cannot continue; the payload says why."""
    LEAVE = 13
    """Either way: nothing more will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; `Kind` says what its number and payload are. `index` is of a tensor."""

    kind: Kind
    index: int = 0
    number: int = 0
    payload: bytearray = b""  # type: ignore[assignment]


class Connection:
    """One end of a connection. Sending is safe from any thread; one thread receives.

    Args:
        peer: the name of the other end in error messages.
        timeout_s: longest time that a send waits for the other side to read.
    """

    def __init__(self, stream: socket.socket, peer: str, timeout_s: float) -> None:
        self._stream = stream
        self._sending = threading.Lock()
        self.peer = peer
        seconds, part = divmod(timeout_s, 1)
        stream.settimeout(None)
        stream.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(part * 1e6))
        )

    def send(
        self,
        kind: Kind,
        *payload: Buffer,
        index: int = 0,
        number: int = 0,
        files: Sequence[int] = (),
    ) -> None:
        """Send one message.

        Raises:
            PeerLost: the other side has closed the connection, or does not read.
        """
        pieces = [memoryview(piece).cast("B") for piece in payload if len(piece)]
        head = HEAD.pack(kind.value, index, number, sum(len(piece) for piece in pieces))
        with self._sending, self._translated():
            if files:
                socket.send_fds(self._stream, [head], list(files))
            else:
                self._stream.sendall(head)
            for piece in pieces:
                self._stream.sendall(piece)

    def receive(self) -> Message:
        """Wait for the next message.

        Raises:
            PeerLost: the other side has closed the connection.
            RemoteProtocolError: the message is of no `Kind`.
        """
        with self._translated():
            return self._read(self._exactly(HEAD.size))

    def receive_files(self, timeout_s: float) -> tuple[Message, list[int]]:
        """Wait for a message with files; for the first message of a connection only.

        Raises:
            PeerLost: the other side has closed the connection, or the message was not complete
                within `timeout_s`.
            RemoteProtocolError: the message is of no `Kind`.
        """
        self._stream.settimeout(timeout_s)
        with self._translated():
            head, files, _, _ = socket.recv_fds(self._stream, HEAD.size, MAX_FILES)
            message = self._read(head + self._exactly(HEAD.size - len(head)))
        self._stream.settimeout(None)
        return message, files

    def break_off(self) -> None:
        """End every call that waits for the other side, now and later. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a `receive` that waits ends."""
        self.break_off()
        self._stream.close()

    def _read(self, head: bytes | bytearray) -> Message:
        number_of_kind, index, number, length = HEAD.unpack(head)
        try:
            kind = Kind(number_of_kind)
        except ValueError as error:
            raise RemoteProtocolError(
                f"{self.peer} on this machine sent a message of unknown kind {number_of_kind}"
            ) from error
        return Message(kind=kind, index=index, number=number, payload=self._exactly(length))

    def _exactly(self, length: int) -> bytearray:
        found = bytearray(length)
        view, got = memoryview(found), 0
        while got < length:
            count = self._stream.recv_into(view[got:])
            if count == 0:
                raise EOFError
            got += count
        return found

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise PeerLost(f"{self.peer} on this machine has gone") from error
        except OSError as error:
            raise PeerLost(
                f"{self.peer} on this machine does not answer: {error.strerror or error}"
            ) from error


def send_all(
    connections: Sequence[Connection], kind: Kind, *payload: Buffer, index: int = 0, number: int = 0
) -> None:
    """Send one message on every connection that is open; the thread that listens to a closed one
    reports it.
    """
    for connection in connections:
        with contextlib.suppress(PeerLost):
            connection.send(kind, *payload, index=index, number=number)


def connect(address: str, network: Network) -> Connection:
    """Connect to the leader, which may not listen yet.

    Args:
        address: the path of its socket.
        network: its interruption may end the attempts, and later the calls that wait for the leader.

    Raises:
        StalenessTimeout: it did not listen in time.
        ServerError: the interruption's.
    """
    deadline = time.monotonic() + network.timeout_s
    while True:
        network.interruption.check()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            stream.close()
        except OSError as error:
            stream.close()
            raise TransportError(
                f"cannot connect to {address}: {error.strerror or error}"
            ) from error
        else:
            if _user_of(stream) != os.getuid():
                stream.close()
                raise TransportError(f"another user of this machine listens at {address}")
            return _connection(stream, "the leading worker", network)
        if time.monotonic() > deadline:
            raise StalenessTimeout(
                f"the leading worker did not listen at {address} within {network.timeout_s:g} s"
            )
        time.sleep(RETRY_S)


def accept(address: str, network: Network, check: Callable[[Message], None]) -> list[Connection]:
    """Listen until all followers of this host are connected.

    Args:
        address: the path of the socket, in a folder that only this user can enter. The folder is
            made if it does not exist (its parent does). The socket is removed on return, and so is
            the folder if it is empty.
        network: of the host's workers. Its interruption may end the wait, and later the calls that
            wait for a follower.
        check: raises where a HELLO does not fit.

    Returns:
        Their connections, by local rank: the first is worker 1's.
    """
    connections: dict[int, Connection] = {}
    accepted: list[Connection] = []
    others, deadline = network.size - 1, time.monotonic() + network.timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(address), 0o700)
            listener.bind(address)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {address}: {error.strerror or error}"
            ) from error
        try:
            listener.listen(others)
            network.interruption.on_interrupt(lambda _: _shut(listener))
            while len(connections) < others:
                stream = _accept_one(listener, deadline, network.timeout_s)
                connection = _connection(stream, "a worker", network)
                accepted.append(connection)
                hello, _ = connection.receive_files(network.timeout_s)
                if hello.number in connections or not 1 <= hello.number <= others:
                    raise PeerLost(
                        f"a worker of this machine came as number {hello.number} of {others + 1}"
                    )
                check(hello)
                connection.peer = f"worker {hello.number}"
                connections[hello.number] = connection
        except Exception as error:
            refuse(accepted, as_server_error(error, "a follower could not be admitted"))
            network.interruption.check()
            raise
        finally:
            os.unlink(address)
            with contextlib.suppress(OSError):  # it holds something else
                os.rmdir(os.path.dirname(address))
    return [connections[rank] for rank in sorted(connections)]


def _shut(listener: socket.socket) -> None:
    """End a wait for followers."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


def _connection(stream: socket.socket, peer: str, network: Network) -> Connection:
    connection = Connection(stream, peer, network.timeout_s)
    network.interruption.on_interrupt(lambda _: connection.break_off())
    return connection


def refuse(connections: Sequence[Connection], error: ServerError) -> None:
    """Send the reason why there will be no exchange, and close the connections."""
    send_all(connections, Kind.FAILED, str(error).encode(errors="backslashreplace"))
    for connection in connections:
        connection.close()


def _accept_one(listener: socket.socket, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            stream, _ = listener.accept()
        except TimeoutError as error:
            raise StalenessTimeout(
                f"not every worker of this machine came within {timeout_s:g} s"
            ) from error
        if _user_of(stream) == os.getuid():
            return stream
        stream.close()  # another user, where the folder is open to others


def _user_of(stream: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel reports it."""
    _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
