"""What a worker knows of one chunk, and what a reader gets of it.

Law: own pushes are counted from the store's first clock: `own` <= `sent` <= `pushed`. Those between `own` and `sent` are
held, because a value that does not include them may still come.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ps_server.protocol import messages as m
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import Feedback, of_pushes
from ps_server.protocol.settings import Precision, StoreSpec, TableSpec


class Piece(NamedTuple):
    """What a reader must do to elements `start:stop` of its copy: take `value`, then add `changes`."""

    start: int
    stop: int
    value: m.Payload
    changes: tuple[m.Payload, ...]


class Held(NamedTuple):
    """A push that has left: so many of this worker's changes."""

    array: m.Payload
    iterations: int


class ChunkCopy:
    """What this worker knows of one chunk."""

    __slots__ = ("asked", "chunk", "clock", "held", "own", "pushed", "sent", "unread")

    def __init__(self, chunk: Chunk, clock: int) -> None:
        self.chunk = chunk
        self.clock = -1  # no value has come
        self.own = clock  # own pushes that the last value includes
        self.pushed = clock  # own pushes so far
        self.sent = clock  # own pushes that have left
        self.unread: m.Payload | None = None
        self.held: deque[Held] = deque()  # own pushes number own, own + 1, ..., sent - 1
        self.asked = -1  # the highest clock asked for

    def includes(self, own: int) -> bool:
        """Whether a value may come that includes so many own pushes: those that have left, each wholly or not at all."""
        at = self.own
        pushes = iter(self.held)
        while at < own and (push := next(pushes, None)) is not None:
            at += push.iterations
        return at == own


def feedback_for(store: StoreSpec, table: TableSpec) -> Feedback | None:
    """What rounds a table's pushes; None where they are sent as they are."""
    precision = of_pushes(store, table)
    if precision is Precision.FLOAT32:
        return None
    return Feedback(table.size, precision, reuse=table.staleness == 0)
