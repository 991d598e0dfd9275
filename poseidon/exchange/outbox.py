"""The queue of a worker's messages to one peer. A pure priority queue.

Laws: a message with a lower priority number overtakes others; messages with one number keep their
order. `FIRST` comes before all of them, `LAST` after them.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from ps_server.transport.base import Buffer

FIRST = -1
"""A priority before all others."""
LAST = 2**62
"""A priority after all others."""


class Waiting(NamedTuple):
    """A queued message. Compared by priority and number, which no two share."""

    priority: int
    number: int
    frames: list[Buffer]


class Outbox:
    """The queued messages for one peer."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, priority: int, frames: list[Buffer]) -> None:
        """Add a message."""
        heapq.heappush(self._heap, Waiting(priority, self._number, frames))
        self._number += 1

    def take(self) -> Waiting:
        """Take the next message; there must be one. `put_back` it when it could not be sent."""
        return heapq.heappop(self._heap)

    def put_back(self, waiting: Waiting) -> None:
        """Put a message back where it was."""
        heapq.heappush(self._heap, waiting)

    def clear(self) -> None:
        """Drop all messages: the peer has gone."""
        self._heap.clear()
