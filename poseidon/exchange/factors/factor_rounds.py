"""The rounds of factors, a state machine without I/O, one on each worker; and `FactorPeers`, their
way to and from all others.

A round is the pairs of all workers for one table and one iteration. Laws:

* A worker sends exactly one pair (u, v) a table and iteration, in the order of iterations; a pair
  may have no rows.
* Rounds are taken in the order of iterations, and only when they have every worker's pair: each
  worker takes the same sequence of rounds, in which everything is added in worker order.
* A worker at clock c has sent the pairs of iterations < c, and reads a table of staleness s only
  when all rounds of iterations < c - s are taken. So no worker's next pair is more than s
  iterations ahead of this worker's own next one; a pair further ahead is an error, which also
  bounds the memory.

    "Factors", table, clock, rows     the payload is `rows` rows of u, then of v, never copied here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from poseidon.exchange.base import Array
from poseidon.exchange.observer import Traffic, TransitTimes
from poseidon.exchange.peers import Peers
from ps_server import RemoteProtocolError
from ps_server.network import Network
from ps_server.protocol.schedule import LinkPriority
from ps_server.trace import NO_TRACE, Tracer, Track
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


class FactorTable(NamedTuple):
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

    def send(self, table: int, pair: Pair) -> int:
        """Store this worker's own next pair, to be sent to every other; return its iteration."""
        return self._store(self.rank, table, pair)

    def receive(self, sender: int, table: int, clock: int, pair: Pair) -> None:
        """Store another worker's pair of an iteration, which fits its table.

        Raises:
            RemoteProtocolError: it is not that worker's next pair; nothing is changed.
        """
        rounds, spec = self._rounds[table], self.tables[table]
        if clock != rounds.sent[sender]:
            raise RemoteProtocolError(
                f"factors of '{spec.name}' came for iteration {clock}; "
                f"expected {rounds.sent[sender]}"
            )
        if clock > rounds.sent[self.rank] + spec.staleness:
            raise RemoteProtocolError(f"factors of '{spec.name}' came too far ahead")
        self._store(sender, table, pair)

    def take(self, table: int) -> list[Pair] | None:
        """Take the next round, once it has every worker's pair: by rank."""
        rounds = self._rounds[table]
        if not self.is_ready(table):
            return None
        rounds.taken += 1
        return [pair for pair in rounds.open.pop(rounds.taken - 1) if pair is not None]

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

    def _store(self, worker: int, table: int, pair: Pair) -> int:
        rounds = self._rounds[table]
        clock = rounds.sent[worker]
        rounds.open.setdefault(clock, [None] * self.workers)[worker] = pair
        rounds.sent[worker] += 1
        return clock


T = TypeVar("T")


class FactorPeers:
    """The factors of one worker.

    Args:
        trace: where spans of factors that are sent, received and applied go.
        link: taken as long as factors have to leave this host; None: no other sender waits for it.

    Attributes:
        monitor: guards the session and what is to be sent.
        changed: called under it after a pair has come.
        transit: the times in transit by table.
    """

    def __init__(
        self,
        session: FactorSession,
        network: Network,
        *,
        trace: Tracer = NO_TRACE,
        link: LinkPriority | None = None,
    ) -> None:
        self.session = session
        on_sent = self._note_sent if trace is not NO_TRACE else None
        self.peers = Peers(network, "factors", link=link, on_sent=on_sent)
        self.peers.on("Factors", 3, self._receive)
        self.links, self.monitor = self.peers.links, self.peers.monitor
        self.changed: Callable[[], None] = self.monitor.notify
        self.bytes_out = [0] * len(session.tables)
        self.bytes_in = [0] * len(session.tables)
        self.transit = TransitTimes(len(session.tables))
        self.trace = trace

    def broadcast(self, table: int, pair: Pair) -> None:
        """Send this worker's next pair of a table to every other; returns at once.

        Factors that the next forward pass needs first overtake others: a table's id is its place in
        the forward order. The pair must not be written to until it is certain that every other
        worker has it: see `FactorSession`.
        """
        with self.monitor:
            self.monitor.check()
            clock, others = self.session.send(table, pair), self.peers.others
            payload = pair.flat.data.cast("B")
            self.peers.send(
                others, "Factors", table, clock, len(pair.u), payload=payload, priority=table
            )
            self.bytes_out[table] += pair.flat.nbytes * len(others)
            self.changed()
        self.links.wake()

    def traffic(self, table: int) -> Traffic:
        """Return the traffic of a table."""
        return Traffic(
            bytes_out=self.bytes_out[table],
            bytes_in=self.bytes_in[table],
            on_way_s=self.transit.total_s[table],
        )

    def wait_for(self, question: Callable[[], T | None], otherwise: str, *, table: int) -> T:
        """Wait until `question` has an answer, and return it (`Monitor.wait_for`).

        Args:
            question: called under the lock whenever something has changed.
            otherwise: the beginning of the sentence that is raised when there is none in time.
            table: whose factors are waited for.

        Raises:
            StalenessTimeout: it did not in time; the text names the workers whose factors are
                missing.
            PeerLost: the connection failed.
        """

        def hangs() -> str:
            lagging = self.peers.names(self.session.lagging(table))
            return f"; missing: {lagging or 'none, they are not applied'}"

        return self.monitor.wait_for(question, otherwise, hangs=hangs)

    def _receive(self, sender: int, fields: Sequence[int], payload: Buffer) -> None:
        began_ns = self.trace.now()
        table, clock, rows = fields
        if not 0 <= table < len(self.session.tables):
            raise RemoteProtocolError("factors came for an unknown table")
        spec = self.session.tables[table]
        pair = Pair.received(payload, rows, spec.outputs, spec.inputs)
        self.session.receive(sender, table, clock, pair)
        self.bytes_in[table] += pair.flat.nbytes
        self.changed()
        self.trace.span(Track.FACTORS, "receive", spec.name, began_ns, worker=sender, clock=clock)

    def _note_sent(self, table: int, receiver: int, began_ns: int) -> None:
        name = self.session.tables[table].name
        self.trace.span(Track.FACTORS, "send", name, began_ns, worker=receiver)
