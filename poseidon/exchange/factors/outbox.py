"""In which order a worker's factors leave for one peer. A pure queue.

Laws: what the next forward pass needs first leaves first, and overtakes what waits; a table's id is its place in the
forward order. Pairs of one table keep their order. The greeting comes before everything, the goodbye after it.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from poseidon.exchange.factors.wire import Buffer

GREETING = -1
"""In place of a table: before everything."""
GOODBYE = 2**62
"""In place of a table: after everything."""


class Waiting(NamedTuple):
    """A message that waits. Compared by table and number, which no two share."""

    table: int
    number: int
    frames: list[Buffer]


class Outbox:
    """The messages that wait for one peer."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, table: int, frames: list[Buffer]) -> None:
        """A message to be sent.

        Args:
            table: whose factors it holds; or `GREETING`, `GOODBYE`.
            frames: what goes on the wire.
        """
        heapq.heappush(self._heap, Waiting(table, self._number, frames))
        self._number += 1

    def take(self) -> Waiting:
        """The next message; there must be one. `put_back` it when it could not be sent."""
        return heapq.heappop(self._heap)

    def put_back(self, waiting: Waiting) -> None:
        """It waits again where it was."""
        heapq.heappush(self._heap, waiting)

    def clear(self) -> None:
        """Nobody waits for these any more."""
        self._heap.clear()
