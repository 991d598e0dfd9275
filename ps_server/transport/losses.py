"""Lost connections: the other process has ended, or nothing comes from its host any more.

Law: ZeroMQ would connect again and continue as if no message had been lost; here the first loss is
final. A host is lost when its kernel has acknowledged nothing for `SILENCE_S` although it should
have (data that was sent, or TCP's own keepalive): long enough for TCP to survive a link that is
down for some seconds. A process that does not read, or is stopped, is not lost: its kernel still
answers.

ZeroMQ's own heartbeats cannot be used: where a queue is full they end healthy connections, and then
the process (libzmq issue 3937).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Collection, Sequence

import zmq

KEEPALIVE_S = 2
SILENCE_S = 10.0
_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_MONITOR = "inproc://losses"
_TCP_INFO_BYTES = 64
_RETRANSMITS_AND_PROBES = struct.Struct("=2xBB")
_LAST_ACK_MS = struct.Struct("=56xI")


def keep_alive(zmq_socket: zmq.Socket[bytes]) -> None:
    """Turn TCP keepalive on. Before the socket is bound or connected."""
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)


def is_silent(tcp_info: bytes, limit_s: float) -> bool:
    """Return whether a host should have acknowledged something and has not for `limit_s`.

    Args:
        tcp_info: Linux's struct tcp_info, at least its first 60 bytes.
        limit_s: seconds.
    """
    retransmits, probes = _RETRANSMITS_AND_PROBES.unpack_from(tcp_info)
    (last_ack_ms,) = _LAST_ACK_MS.unpack_from(tcp_info)
    return bool(retransmits or probes) and last_ack_ms >= limit_s * 1000


class LossWatch:
    """Watches connecting sockets, each of which has one peer.

    Args:
        sockets: not yet connected, all of one context.
        silence_s: how long a host may acknowledge nothing.
    """

    def __init__(self, sockets: Sequence[zmq.Socket[bytes]], silence_s: float = SILENCE_S) -> None:
        self._watched = sockets
        self._silence_s = silence_s
        self.sockets = [_monitor(watched, number) for number, watched in enumerate(sockets)]
        """What to wait on; call `process` when one is readable."""
        self._descriptors: dict[int, int] = {}
        self._established: set[int] = set()
        self.lost: set[int] = set()
        """The sockets whose connections were lost."""

    def process(self) -> None:
        """Note which connections were made and lost."""
        for number, monitor in enumerate(self.sockets):
            with contextlib.suppress(zmq.Again):
                while True:
                    head, *_ = monitor.recv_multipart(zmq.NOBLOCK)
                    self._note(number, *struct.unpack_from("=HI", head))

    @property
    def reached(self) -> Collection[int]:
        """The sockets whose peer's kernel has answered."""
        return self._descriptors.keys()

    def check_silence(self) -> None:
        """Read from the kernel which hosts acknowledge nothing; call it every second or so."""
        for number in self._established - self.lost:
            if _silent_for(self._descriptors[number], self._silence_s):
                self.lost.add(number)

    def forget(self, number: int) -> None:
        """Stop watching a socket: its connection may end."""
        self._established.discard(number)
        self.lost.discard(number)

    def _note(self, number: int, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._descriptors[number] = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._established.add(number)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or number in self._established:
            self.lost.add(number)  # else it was an attempt to connect, and another follows

    def close(self) -> None:
        """Stop watching. Before the watched sockets are closed."""
        for watched in self._watched:
            watched.disable_monitor()
        for monitor in self.sockets:
            monitor.close(0)


def _silent_for(descriptor: int, limit_s: float) -> bool:
    """Return whether the peer of a connection is silent. ZeroMQ may close its
    descriptor at any moment, and reports that.
    """
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return False
    finally:
        borrowed.detach()
    return len(info) == _TCP_INFO_BYTES and is_silent(info, limit_s)


def _monitor(watched: zmq.Socket[bytes], number: int) -> zmq.Socket[bytes]:
    address = f"{_MONITOR}-{number}"
    watched.monitor(address, _WATCHED)
    monitor: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room otherwise
    monitor.connect(address)
    return monitor
