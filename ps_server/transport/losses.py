"""Connections that stood and are lost: because the other process has ended, or because nothing of its host comes any more.

Law: ZeroMQ would connect again and go on as if nothing had been lost on the way; here the first loss is final. A host
is lost when its kernel has acknowledged nothing for `SILENCE_S` though it was asked to (by what was sent, or by TCP's own
keepalive): long enough for TCP to come through a link that was gone for some seconds. A process that does not read, or is
stopped, is not lost: its kernel still answers.

ZeroMQ's heartbeats are no way to do this: where a queue is full they end connections that are well, and then the process
(libzmq issue 3937).
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

import zmq

KEEPALIVE_S = 2
SILENCE_S = 10.0
_MONITOR = "inproc://losses"
_TCP_INFO_BYTES = 64
_RETRANSMITS_AND_PROBES = struct.Struct("=2xBB")
_LAST_ACK_MS = struct.Struct("=56xI")


def keep_alive(zmq_socket: zmq.Socket[bytes]) -> None:
    """Make the kernel ask a peer that says nothing whether it is there. Before the socket is bound or connected."""
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)


def is_silent(tcp_info: bytes, limit_s: float) -> bool:
    """Whether a host owes an answer and has given none for `limit_s`.

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
        silence_s: how long a host may owe an answer.
    """

    def __init__(self, sockets: Sequence[zmq.Socket[bytes]], silence_s: float = SILENCE_S) -> None:
        self._watched = sockets
        self._silence_s = silence_s
        self.sockets = [_monitor(watched, number) for number, watched in enumerate(sockets)]
        """What to wait on; `attend` when one is readable."""
        self._descriptors: dict[int, int] = {}
        self._standing: set[int] = set()
        self.lost: set[int] = set()
        """The sockets whose connections were lost."""

    def attend(self) -> None:
        """See what has happened."""
        for number, monitor in enumerate(self.sockets):
            with contextlib.suppress(zmq.Again):
                while True:
                    head, *_ = monitor.recv_multipart(zmq.NOBLOCK)
                    self._see(number, *struct.unpack_from("=HI", head))

    def look_for_silence(self) -> None:
        """Ask the kernel who has not answered; every second or so."""
        for number in self._standing - self.lost:
            if _silent_for(self._descriptors[number], self._silence_s):
                self.lost.add(number)

    def _see(self, number: int, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._descriptors[number] = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._standing.add(number)
        elif number in self._standing:  # before, it was an attempt to connect
            self.lost.add(number)

    def close(self) -> None:
        """Stop watching. Before the watched sockets are closed."""
        for watched in self._watched:
            watched.disable_monitor()
        for monitor in self.sockets:
            monitor.close(0)


def _silent_for(descriptor: int, limit_s: float) -> bool:
    """Of a descriptor that is ZeroMQ's: it may be closed at any moment, which ZeroMQ will tell."""
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
    watched.monitor(address, zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    monitor: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for room otherwise
    monitor.connect(address)
    return monitor
