"""Authentication of the peers of a listening socket: ZeroMQ's ZAP protocol, answered from a list
of public keys.

Law: with keys, only CURVE with a key on the list is admitted; every other peer is refused before a
byte of it reaches the transport. All of this happens on the transport's own thread, while a peer
tries to connect.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from ps_server.keys import Keyring

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"poseidon"
HANDSHAKE_MS = 10_000
"""Longest time of a handshake."""
_MONITOR = "inproc://handshakes"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Authenticator:
    """Authenticates the peers of one listening socket, the only one of its context.

    Args:
        socket: not yet bound.
        keys: own pair and whom to admit; None: admits every peer, and counts those whose handshake
            fails.
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keyring | None) -> None:
        self.refused = 0
        """Connections that have not been authenticated; one whose handshake is under way counts,
        too.
        """
        self._open: set[int] = set()
        self._socket = socket
        self._admit = {z85.decode(key): rank for rank, key in enumerate(keys.admit)} if keys else {}
        self._zap: zmq.Socket[bytes] | None = None
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if keys is not None:
            self._zap = socket.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ADDRESS)
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer ZeroMQ admits no peer
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
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
        key = credentials[0] if mechanism == b"CURVE" and domain == DOMAIN and credentials else b""
        rank = self._admit.get(key)
        if rank is None:
            return [ZAP_VERSION, identifier, b"400", b"not one of this job", b"", b""]
        return [ZAP_VERSION, identifier, b"200", b"", b"%d" % rank, b""]

    def close(self) -> None:
        """Stop. Before the listening socket is closed."""
        self._socket.disable_monitor()
        for socket in self.sockets:
            socket.close(0)
