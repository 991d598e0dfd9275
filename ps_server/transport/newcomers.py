"""Connections whose peers have not shown yet that they belong to the job: which of them end, so
that strangers take few of the process's files, and the job's peers still get in.

Law: knows no socket. Connections before ZeroMQ's handshake have a limit, and those after it as much
again, so that silent strangers do not displace a peer that has got further. Above it connections
end whose sender has the most, the oldest first: a flood from one address does not touch the
connections of others. Each has a moment, in which a peer of the job becomes known; if more come
meanwhile the port closes. A connection whose peer is known is not counted, and never ended.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FILES_A_NEWCOMER = 16
"""One in so many of the process's files is for newcomers before the handshake, and one for those
after it. A worker listens at up to three ports.
"""
FEWEST, MOST = 4, 512
MOMENT_S = 0.25
"""How long a connection is not ended: a handshake and a first message take milliseconds."""
NETWORK_BYTES = 8
"""Of an IPv6 address: who has one address usually has all that begin like it."""
LONGEST_HANDSHAKE_BYTES = 2 * 1024
LONGEST_BYTES = 64 * 1024
"""Most that a peer sends before it is known: its first message is far shorter."""


def limit_of(files: int) -> int:
    """Return how many connections a listener holds at one stage.

    Args:
        files: that the process may have open (`ulimit -n`).
    """
    return max(FEWEST, min(MOST, files // FILES_A_NEWCOMER))


def sender_of(address: str) -> bytes:
    """Return what all connections of one sender have in common.

    Args:
        address: a number; what is none is a sender of its own.
    """
    try:
        number = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode()
    mapped = getattr(number, "ipv4_mapped", None)
    return bytes((mapped or number).packed[:NETWORK_BYTES])


@dataclass(slots=True)
class _Newcomer:
    """A connection.

    Attributes:
        sender: see `sender_of`.
        came_s: when.
        greeted: whether ZeroMQ's handshake is over.
        peer: the name under which it has sent something.
        too_long: whether it had sent too much when it was last looked at.
    """

    sender: bytes
    came_s: float
    greeted: bool = False
    peer: bytes = b""
    too_long: bool = False


class Newcomers:
    """The connections of a listener that are not known to be the job's, by descriptor.

    Args:
        limit: see `limit_of`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._newcomers: dict[int, _Newcomer] = {}
        """In the order in which they came."""
        self._of_peer: dict[bytes, int] = {}
        self._ending: set[int] = set()

    @property
    def waiting(self) -> Sequence[int]:
        """The connections that are neither known nor ending."""
        return list(self._newcomers)

    @property
    def crowded(self) -> bool:
        """Whether connections come faster than they end: the port should be closed meanwhile."""
        return len(self._newcomers) + len(self._ending) >= 2 * self._limit

    def came(self, descriptor: int, address: str, now_s: float) -> None:
        """Note a new connection and its address."""
        self._newcomers[descriptor] = _Newcomer(sender_of(address), now_s)

    def greeted(self, descriptor: int) -> None:
        """Note that ZeroMQ's handshake is over."""
        if newcomer := self._newcomers.get(descriptor):
            newcomer.greeted = True

    def spoke(self, descriptor: int, peer: bytes) -> None:
        """Note under which name a connection sends messages."""
        newcomer = self._newcomers.get(descriptor)
        if newcomer and newcomer.peer != peer:
            newcomer.peer = peer
            self._of_peer[peer] = descriptor

    def known(self, peer: bytes) -> None:
        """Note that a peer is the job's."""
        self._forget(self._of_peer.get(peer, -1))

    def left(self, descriptor: int) -> None:
        """Note that a connection has ended."""
        self._ending.discard(descriptor)
        self._forget(descriptor)

    def too_long(self, received: dict[int, int]) -> Sequence[int]:
        """Return, and count as ending, the connections that had sent more than a handshake, or a
        first message, at two looks: what had come at the first one would have got a peer further.

        Args:
            received: bytes that each has sent.
        """
        found = []
        for descriptor, count in received.items():
            newcomer = self._newcomers.get(descriptor)
            if newcomer is None:
                continue
            is_long = count > (LONGEST_BYTES if newcomer.greeted else LONGEST_HANDSHAKE_BYTES)
            if is_long and newcomer.too_long:
                found.append(descriptor)
            newcomer.too_long = is_long
        return self._end(found)

    def too_many(self, now_s: float) -> Sequence[int]:
        """Return, and count as ending, connections above the limits that have had their moment."""
        if len(self._newcomers) <= self._limit:
            return ()
        found: list[int] = []
        for greeted in (False, True):
            stage = [item for item in self._newcomers.items() if item[1].greeted is greeted]
            by_sender: dict[bytes, deque[int]] = {}
            for descriptor, newcomer in stage:
                by_sender.setdefault(newcomer.sender, deque()).append(descriptor)
            for _ in range(len(stage) - self._limit):
                oldest = max(by_sender.values(), key=len)
                if now_s - self._newcomers[oldest[0]].came_s < MOMENT_S:
                    break
                found.append(oldest.popleft())
        return self._end(found)

    def all_known(self) -> Sequence[int]:
        """Return, and count as ending, what is left once every peer of the job is known."""
        return self._end(list(self._newcomers))

    def _end(self, descriptors: Sequence[int]) -> Sequence[int]:
        for descriptor in descriptors:
            self._forget(descriptor)
            self._ending.add(descriptor)
        return descriptors

    def _forget(self, descriptor: int) -> None:
        newcomer = self._newcomers.pop(descriptor, None)
        if newcomer and newcomer.peer:
            self._of_peer.pop(newcomer.peer, None)
