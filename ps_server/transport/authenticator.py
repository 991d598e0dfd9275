"""Authentication of the peers of a listening socket: ZeroMQ's ZAP protocol, answered by what reads
the first message of a handshake.

Law: with keys, only a peer whose first message is from a key on the list is admitted; every other
peer is refused before a byte of it reaches the transport. All of this happens on the transport's
own thread, while a peer tries to connect.

Connections whose peers are not known to be the job's are few (`newcomers.py`): above their limit
the oldest end, and while more come than end the port is closed. So strangers never take the files
of the process.

ZeroMQ's PLAIN mechanism carries the first message, in the field of the password.
"""

from __future__ import annotations

import contextlib
import math
import resource
import struct
import time
from collections.abc import Callable, Iterable, Sequence

import zmq

from ps_server.transport.listening import Borrowed, Listening, Place
from ps_server.transport.newcomers import Newcomers, limit_of

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
LOOK_S = 0.1
"""How often is looked at how much newcomers have sent."""
MOST_ANSWERS = 64
"""Handshakes that one turn answers: what has come from peers waits meanwhile."""
EVENTS_AN_ANSWER = 64
"""Of connections: strangers who say nothing cost less than those who do."""
DESCRIPTOR = "__fd"
"""ZeroMQ's name of the connection that a message has come by."""
_MONITOR = "inproc://handshakes"
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Authenticator:
    """Authenticates the peers of one listening socket, the only one of its context.

    Args:
        socket: not yet bound.
        listening: what it is going to be bound to.
        admit: returns the user id of a peer from the first message of its handshake, or None to
            refuse it. None: admits every peer, and counts those whose handshake fails.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        listening: Listening,
        admit: Callable[[bytes], bytes | None] | None,
    ) -> None:
        self.refused = 0
        """Connections that have not been authenticated, one whose handshake is under way among them,
        and what else its owner adds.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._newcomers = Newcomers(limit_of(files))
        self._listening = listening
        self._borrowed = Borrowed(listening)
        self._open: dict[int, Place] = {}
        self._admits_no_more = False
        self._looked_s, self._drained = -math.inf, True
        self._socket = socket
        self._admit = admit
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)
        # Without an answer ZeroMQ admits no peer. It also refuses its protocols of before 2013: to
        # them any bytes are a message.
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if admit is not None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._events = socket.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room otherwise
        socket.monitor(_MONITOR, _WATCHED)
        self._events.connect(_MONITOR)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What to wait on, besides the socket itself; call `process` when one is readable."""
        return [self._zap, self._events]

    def process(self) -> None:
        """Answer the requests that have come, count connections, and end those that are too many.
        It returns also while more and more come.
        """
        for _ in range(MOST_ANSWERS):
            if not (self._answer_one() | self._note_some()):
                break
        now_s = time.monotonic()
        self._end(self._newcomers.too_many(now_s))
        due = self._drained and now_s - self._looked_s >= LOOK_S
        if due and (waiting := self._newcomers.waiting):
            self._looked_s, self._drained = now_s, False
            received = {
                each: self._borrowed.received_bytes(each, self._open[each]) for each in waiting
            }
            self._end(self._newcomers.too_long(received))
        self._open_port(not self._newcomers.crowded)

    def _answer_one(self) -> bool:
        with contextlib.suppress(zmq.Again):
            self._zap.send_multipart(self._answer(self._zap.recv_multipart(zmq.NOBLOCK)))
            return True
        return False

    def _note_some(self) -> bool:
        found = False
        with contextlib.suppress(zmq.Again):
            for _ in range(EVENTS_AN_ANSWER):
                head, *_ = self._events.recv_multipart(zmq.NOBLOCK)
                event, descriptor = struct.unpack_from("=HI", head)
                self._note(event, descriptor, time.monotonic())
                found = True
        return found

    def _note(self, event: int, descriptor: int, now_s: float) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.refused += 1
            self._open[descriptor] = place = self._borrowed.place(descriptor)
            self._newcomers.came(descriptor, str(place[0]) if place else "", now_s)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refused -= 1
            self._newcomers.greeted(descriptor)
        else:
            self._open.pop(descriptor, None)
            self._newcomers.left(descriptor)

    def _end(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            self._borrowed.end(descriptor, self._open[descriptor])

    def _open_port(self, takes: bool) -> None:
        if self._listening.is_shut == takes and not self._admits_no_more:
            (self._listening.reopen if takes else self._listening.shut)()

    def spoke(self, peer: bytes, frame: zmq.Frame) -> None:
        """Note by which connection a message of a peer has come."""
        self._newcomers.spoke(int(frame.get(DESCRIPTOR)), peer)

    def drained(self) -> None:
        """Note that all messages were taken that had come. Before that nobody is judged once more
        by what was sent: on a loaded machine this process may be late.
        """
        self._drained = True

    def known(self, peer: bytes) -> None:
        """Note that a peer is the job's: its connection is not ended for the sake of others."""
        self._newcomers.known(peer)

    def admit_no_more(self) -> None:
        """Close the port for good, and end what is not known."""
        self._admits_no_more = True
        self._listening.shut()
        self.process()
        self._end(self._newcomers.all_known())

    @property
    def connections(self) -> int:
        """The number of open connections, those whose handshake is under way among them."""
        return len(self._open)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        _, identifier, domain, _, _, mechanism, *credentials = request
        user = None if self._admit else b""
        if (mechanism, domain, credentials[:1]) == (MECHANISM, DOMAIN, [USERNAME]) and self._admit:
            user = self._admit(credentials[1])
        if user is None:
            return [ZAP_VERSION, identifier, REFUSED, b"not one of this job", b"", b""]
        return [ZAP_VERSION, identifier, b"200", b"", user, b""]

    def close(self) -> None:
        """Stop. Before the listening socket is closed."""
        self._socket.disable_monitor()
        self._borrowed.close()
        for socket in self.sockets:
            socket.close(0)


def introduce(socket: zmq.Socket[bytes], first: bytes) -> None:
    """Make a socket begin its connection with the first message of a handshake."""
    socket.setsockopt(zmq.PLAIN_USERNAME, USERNAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, first)
