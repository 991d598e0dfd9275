"""When to try again to send to peers that block, where no event tells that they no longer do.

Law: a peer is tried again after a part of the time that a message to it has taken lately, so that
of the few messages that wait for it beyond this process the last has not left by then; a slow link
costs few attempts, a fast one no pause.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Peer = TypeVar("Peer")

LEAST_S = 0.001
MOST_S = 0.02
"""A link of 100 Mbit/s takes 256 KiB in this time."""
_PART = 0.5
_GROWTH = 1.5


class Retries(Generic[Peer]):
    """The peers that block, and when to try each again. All times are seconds on one clock."""

    def __init__(self) -> None:
        self.peers: set[Peer] = set()
        """The peers that block."""
        self._due_s: dict[Peer, float] = {}
        self._taken_s: dict[Peer, float] = {}
        self._pause_s: dict[Peer, float] = {}

    def add(self, peer: Peer, now_s: float) -> None:
        """Note that a peer took nothing."""
        pause_s = self._pause_s.get(peer, LEAST_S)
        if peer in self.peers:  # slower than it was
            pause_s = self._pause_s[peer] = min(pause_s * _GROWTH, MOST_S)
        self.peers.add(peer)
        self._due_s[peer] = now_s + pause_s

    def taken(self, peer: Peer, now_s: float) -> None:
        """Note that a peer took a message."""
        if peer in self.peers:
            took_s = now_s - self._taken_s[peer] if peer in self._taken_s else LEAST_S
            self._pause_s[peer] = min(max(took_s * _PART, LEAST_S), MOST_S)
            self.peers.discard(peer)
        self._taken_s[peer] = now_s

    def forget(self, peer: Peer) -> None:
        """Forget a peer that has gone."""
        self.peers.discard(peer)
        for times in (self._due_s, self._taken_s, self._pause_s):
            times.pop(peer, None)

    def is_early(self, peer: Peer, now_s: float) -> bool:
        """Return whether it is too early to try a peer again."""
        return peer in self.peers and now_s < self._due_s[peer]

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next attempt; infinite where none blocks."""
        return max(
            0.0, min((self._due_s[peer] for peer in self.peers), default=float("inf")) - now_s
        )

    def try_all(self) -> None:
        """Let all be tried again at once."""
        for peer in self.peers:
            self._due_s[peer] = 0.0
