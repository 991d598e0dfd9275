"""A worker's copy of one chunk: its clock, the worker's own pushes, and what a reader gets of it.

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
    """A reader's update of elements `start:stop`: set them to `value`, then add `changes`."""

    start: int
    stop: int
    value: m.Payload
    changes: tuple[m.Payload, ...]


class Held(NamedTuple):
    """A push that has left, with the changes of so many iterations."""

    array: m.Payload
    iterations: int


class ChunkCopy:
    """One chunk on one worker."""

    __slots__ = ("chunk", "clock", "held", "own", "pushed", "requested", "sent", "unread")

    def __init__(self, chunk: Chunk, clock: int) -> None:
        self.chunk = chunk
        self.clock = -1  # no value has come
        self.own = clock  # own pushes that the last value includes
        self.pushed = clock  # own pushes so far
        self.sent = clock  # own pushes that have left
        self.unread: m.Payload | None = None
        self.held: deque[Held] = deque()  # own pushes number own, own + 1, ..., sent - 1
        self.requested = -1  # the highest clock of a `Get`

    def includes(self, own: int) -> bool:
        """Return whether a value may include so many own pushes: pushes that have left, each as a whole."""
        at = self.own
        pushes = iter(self.held)
        while at < own and (push := next(pushes, None)) is not None:
            at += push.iterations
        return at == own


def feedback_for(store: StoreSpec, table: TableSpec) -> Feedback | None:
    """Return what rounds a table's pushes; None where they are sent as they are."""
    precision = of_pushes(store, table)
    if precision is Precision.FLOAT32:
        return None
    return Feedback(table.size, precision, reuse=table.staleness == 0)
