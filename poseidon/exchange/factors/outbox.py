"""The queue of a worker's messages to one peer. A pure priority queue.

Laws: pairs that the next forward pass needs first leave first, and overtake others; a table's id is
its place in the forward order. Pairs of one table keep their order. `Join` comes before all pairs,
`Leave` after them.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from poseidon.exchange.factors.factor_frames import Buffer

FIRST = -1
"""In place of a table: before all pairs."""
LAST = 2**62
"""In place of a table: after all pairs."""


class Waiting(NamedTuple):
    """A queued message. Compared by table and number, which no two share."""

    table: int
    number: int
    frames: list[Buffer]


class Outbox:
    """The queued messages for one peer."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, table: int, frames: list[Buffer]) -> None:
        """Add a message.

        Args:
            table: whose factors it holds; or `FIRST`, `LAST`.
            frames: what goes on the wire.
        """
        heapq.heappush(self._heap, Waiting(table, self._number, frames))
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
