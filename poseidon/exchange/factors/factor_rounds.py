"""The rounds of factors: a state machine without I/O, one on each worker.

A round is the pairs of all workers for one table and one iteration. Laws:

* A worker sends exactly one pair (u, v) a table and iteration, in the order of iterations; a pair
  may have no rows.
* Rounds are taken in the order of iterations, and only when they have every worker's pair: each
  worker takes the same sequence of rounds, in which everything is added in worker order.
* A worker at clock c has sent the pairs of iterations < c, and reads a table of staleness s only
  when all rounds of iterations < c - s are taken. So no worker's next pair is more than s
  iterations ahead of this worker's own next one; a pair further ahead is an error, which also
  bounds the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from poseidon.exchange.base import Array
from ps_server import RemoteProtocolError
from ps_server.transport.base import Buffer


class Pair(NamedTuple):
    """One worker's factors of one table and iteration: u_KN and v_KM, K >= 0 rows.

    Attributes:
        flat: the rows of u, then of v, float32: as they travel.
        u: a view of it.
        v: the same.
    """

    flat: Array
    u: Array
    v: Array

    @classmethod
    def over(cls, flat: Array, rows: int, outputs: int, inputs: int) -> Pair:
        """Return the factors of `rows` rows in flat memory."""
        u, v = np.split(flat, [rows * outputs])
        return cls(flat, u.reshape(rows, outputs), v.reshape(rows, inputs))

    @classmethod
    def received(cls, payload: Buffer, rows: int, outputs: int, inputs: int) -> Pair:
        """Return the factors of a message, in its memory.

        Raises:
            RemoteProtocolError: it has other rows.
        """
        if rows < 0 or memoryview(payload).nbytes != 4 * rows * (outputs + inputs):
            raise RemoteProtocolError(
                f"factors of {rows} rows for {outputs} x {inputs} come in "
                f"{memoryview(payload).nbytes} bytes"
            )
        return cls.over(np.frombuffer(payload, "<f4"), rows, outputs, inputs)


class FactorRound(NamedTuple):
    """All workers' pairs of iteration `clock`, by rank."""

    clock: int
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorTable:
    """A weight that travels as factors.

    Args:
        outputs: N.
        inputs: M.
        staleness: the bound s of its reads.
    """

    name: str
    outputs: int
    inputs: int
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """The sender's pair for a table in iteration `clock`."""

    table: int
    clock: int
    pair: Pair


class _Rounds:
    """The open rounds of one table."""

    def __init__(self, workers: int, clock: int) -> None:
        self.taken = clock  # rounds < taken have been taken
        self.sent = [clock] * workers  # by worker: pairs < sent have come
        self.open: dict[int, list[Pair | None]] = {}


class FactorSession:
    """One worker's view of all rounds.

    Args:
        tables: the tables, by id; the same on every worker.
        start_clock: the iteration to begin at.
    """

    def __init__(
        self, rank: int, workers: int, tables: Sequence[FactorTable], start_clock: int = 0
    ) -> None:
        self.rank = rank
        self.workers = workers
        self.tables = tuple(tables)
        self._rounds = [_Rounds(workers, start_clock) for _ in tables]

    def send(self, table: int, pair: Pair) -> Factors:
        """Store this worker's own next pair; return the message for every other worker."""
        clock = self._rounds[table].sent[self.rank]
        self._store(self.rank, table, pair)
        return Factors(table, clock, pair)

    def receive(self, sender: int, factors: Factors) -> None:
        """Store another worker's pair, which fits its table.

        Raises:
            RemoteProtocolError: it is not that worker's next pair; nothing is changed.
        """
        rounds, spec = self._rounds[factors.table], self.tables[factors.table]
        if factors.clock != rounds.sent[sender]:
            raise RemoteProtocolError(
                f"worker {sender} sent factors of '{spec.name}' for iteration {factors.clock}; "
                f"expected {rounds.sent[sender]}"
            )
        if factors.clock > rounds.sent[self.rank] + spec.staleness:
            raise RemoteProtocolError(
                f"worker {sender} is too far ahead with factors of '{spec.name}'"
            )
        self._store(sender, factors.table, factors.pair)

    def take(self, table: int) -> FactorRound | None:
        """Take the next round, once it has every worker's pair."""
        rounds = self._rounds[table]
        pairs = rounds.open.get(rounds.taken)
        complete = tuple(pair for pair in pairs or () if pair is not None)
        if len(complete) < self.workers:
            return None
        del rounds.open[rounds.taken]
        rounds.taken += 1
        return FactorRound(rounds.taken - 1, complete)

    def is_ready(self, table: int) -> bool:
        """Return whether `take` would return a round."""
        rounds = self._rounds[table]
        return min(rounds.sent) > rounds.taken

    def own(self, table: int) -> list[tuple[int, Pair]]:
        """Return this worker's pairs in rounds that are not taken, as (iteration, pair)."""
        rounds = self._rounds[table]
        pairs = ((clock, rounds.open[clock][self.rank]) for clock in sorted(rounds.open))
        return [(clock, pair) for clock, pair in pairs if pair is not None]

    def lagging(self, table: int) -> list[int]:
        """Return the workers whose pair is missing in the next round."""
        rounds = self._rounds[table]
        return [worker for worker, sent in enumerate(rounds.sent) if sent <= rounds.taken]

    def _store(self, worker: int, table: int, pair: Pair) -> None:
        rounds = self._rounds[table]
        clock = rounds.sent[worker]
        rounds.open.setdefault(clock, [None] * self.workers)[worker] = pair
        rounds.sent[worker] += 1
