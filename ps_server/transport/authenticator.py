"""Authentication of the peers of a listening socket: ZeroMQ's ZAP protocol, answered by what reads
the first message of a handshake.

Law: with keys, only a peer whose first message is from a key on the list is admitted; every other
peer is refused before a byte of it reaches the transport. All of this happens on the transport's
own thread, while a peer tries to connect.

ZeroMQ's PLAIN mechanism carries the first message, in the field of the password.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence

import zmq

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"poseidon"
REFUSED = b"300"
"""Ends the connection without a word: a peer of the job that has met another process where it
expects its own tries again. After 400 its ZeroMQ would not.
"""
MECHANISM = b"PLAIN"
USERNAME = b"poseidon"
USER = "User-Id"
"""ZeroMQ's name of what an answer gives to a connection: each of its messages has it."""
HANDSHAKE_MS = 10_000
"""Longest time of a handshake."""
_MONITOR = "inproc://handshakes"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Authenticator:
    """Authenticates the peers of one listening socket, the only one of its context.

    Args:
        socket: not yet bound.
        admit: returns the user id of a peer from the first message of its handshake, or None to
            refuse it. None: admits every peer, and counts those whose handshake fails.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], admit: Callable[[bytes], bytes | None] | None
    ) -> None:
        self.refused = 0
        """Connections that have not been authenticated; one whose handshake is under way counts,
        too.
        """
        self._open: set[int] = set()
        self._socket = socket
        self._admit = admit
        self._zap: zmq.Socket[bytes] | None = None
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if admit is not None:
            self._zap = socket.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ADDRESS)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer ZeroMQ admits no peer
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room otherwise
        socket.monitor(_MONITOR, _WATCHED)
        self._events.connect(_MONITOR)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What to wait on, besides the socket itself; call `process` when one is readable."""
        return [self._events] if self._zap is None else [self._zap, self._events]

    def process(self) -> None:
        """Answer the requests that have come, and count connections."""
        with contextlib.suppress(zmq.Again):
            while self._zap is not None:
                self._zap.send_multipart(self._answer(self._zap.recv_multipart(zmq.NOBLOCK)))
        with contextlib.suppress(zmq.Again):
            while True:
                head, *_ = self._events.recv_multipart(zmq.NOBLOCK)
                self._note(*struct.unpack_from("=HI", head))

    def _note(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.refused += 1
            self._open.add(descriptor)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refused -= 1
        else:
            self._open.discard(descriptor)

    @property
    def connections(self) -> int:
        """The number of open connections, those whose handshake is under way among them."""
        return len(self._open)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        _, identifier, domain, _, _, mechanism, *credentials = request
        user = None
        if (mechanism, domain, credentials[:1]) == (MECHANISM, DOMAIN, [USERNAME]) and self._admit:
            user = self._admit(credentials[1])
        if user is None:
            return [ZAP_VERSION, identifier, REFUSED, b"not one of this job", b"", b""]
        return [ZAP_VERSION, identifier, b"200", b"", user, b""]

    def close(self) -> None:
        """Stop. Before the listening socket is closed."""
        self._socket.disable_monitor()
        for socket in self.sockets:
            socket.close(0)


def introduce(socket: zmq.Socket[bytes], first: bytes) -> None:
    """Make a socket begin its connection with the first message of a handshake."""
    socket.setsockopt(zmq.PLAIN_USERNAME, USERNAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, first)
