"""A worker's handle on the store, as tasks of a simulated process: the calls of `Client`, whose
waits are questions. Session, queues and what moves messages are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from ps_server.errors import as_server_error
from ps_server.monitor import Monitor
from ps_server.protocol import messages as m
from ps_server.protocol.bandwidth import ChangeLog
from ps_server.protocol.messages import Addressed
from ps_server.protocol.precision import add
from ps_server.protocol.settings import StoreSpec
from ps_server.protocol.shard import Shard
from ps_server.protocol.virtual_workers import Node, TreeSum
from ps_server.protocol.worker_session import Session
from ps_server.pump import Pump
from ps_server.server import Server
from ps_server.shared_memory import WorkerSharedMemory
from ps_server.trace import NO_TRACE
from tests.simulation.network import Fabric, SimulatedClient, SimulatedServer
from tests.simulation.processes import Process, Question

TIMEOUT_S = 60.0
SECRET = b"secret"
Waits = Generator[float | Question, Any, Any]


def serve_shard(
    fabric: Fabric,
    process: Process,
    index: int,
    workers: int,
    *,
    name: str = "",
    token: bytes = SECRET,
    ended: Callable[[], None] = lambda: None,
) -> Server:
    """Run a shard in a process; its end has a name, or the process's.

    Args:
        fabric: the network.
        process: of the shard.
        index: of the shard.
        workers: how many it serves.
        name: of its end; empty: the process's.
        token: of the job.
        ended: called when it serves no more.
    """
    end = fabric.end(process, name or process.name)
    shard = Shard(index, workers, token)
    transport = SimulatedServer(fabric, end)
    server = Server(shard, transport, clock=fabric.world.clock)

    def failed(error: Exception) -> None:
        raise error

    def close() -> None:
        transport.close()
        ended()

    end.loop = process.loop(server.steps(), failed, close)
    return server


class SimulatedWorker:
    """One worker's client.

    Args:
        fabric: the network.
        process: of the worker.
        rank: of the worker.
        store: the store.
        shards: the names of the shards' ends.
        bandwidth_mbps: as for `Client`.
        table_clocks: as for `Client`.
        name: of its end; the process's if empty.
        token: of the job.
    """

    def __init__(
        self,
        fabric: Fabric,
        process: Process,
        rank: int,
        store: StoreSpec,
        shards: Sequence[str],
        *,
        bandwidth_mbps: float | None = None,
        table_clocks: bool = False,
        name: str = "",
        token: bytes = SECRET,
    ) -> None:
        world = fabric.world
        log = None if bandwidth_mbps is None else ChangeLog(bandwidth_mbps, world.now)
        self.rank = rank
        self.timeout_s = TIMEOUT_S
        self.monitor = Monitor(TIMEOUT_S, closed="the client is closed", hangs="")
        self.session = Session(rank, store, token, log=log, table_clocks=table_clocks)
        self._end = fabric.end(process, name or process.name)
        self._transport = SimulatedClient(fabric, self._end, shards)
        self._pump = Pump(
            self.session,
            self._transport,
            WorkerSharedMemory(()),
            self.monitor,
            NO_TRACE,
            clock=world.clock,
        )
        self._process = process
        self._gone = False
        self._pending: list[m.SignalKind] = []
        self._end.loop = process.loop(self._pump.steps(), self._failed, self._ended)

    def _failed(self, error: Exception) -> None:
        self.monitor.fail(as_server_error(error, f"the connection of worker {self.rank} failed"))
        self._ended()

    def _ended(self) -> None:
        self._gone = True
        self._transport.close()

    def do(self, outgoing: Sequence[Addressed]) -> None:
        """Queue messages."""
        self._pump.add(outgoing)
        self._end.wake()

    def wait_for(self, question: Callable[[], object], text: str) -> Waits:
        """Wait as `Monitor.wait_for` does."""

        def ask() -> object:
            answer = question()
            if answer is None:
                self.monitor.check()
            return answer

        return (yield Question(ask, f"worker {self.rank}: {text}", self.timeout_s))

    def start(self, initial: Callable[[int], Sequence[m.Array]]) -> Waits:
        """See `Client.start`."""
        self.do(self.session.start(initial))
        for table in self.session.own_tables:
            yield from self.fresh(table)
        for kind in self._pending:
            self.signal(kind)
        self._pending = []

    def fresh(self, table: int, staleness: int | None = None) -> Waits:
        """Wait until a table may be read."""
        session = self.session
        self.do(session.ask(table, staleness))
        yield from self.wait_for(
            lambda: True if session.missing(table, staleness) is None else None,
            f"table {table} for iteration {session.clock}",
        )

    def read(self, table: int, out: m.Array, staleness: int | None = None) -> Waits:
        """See `Client.read`."""
        yield from self.fresh(table, staleness)
        for piece in self.session.values.take(table):
            view = out[piece.start : piece.stop]
            np.copyto(view, piece.value)
            for change in piece.changes:
                add(view, change)

    def push(self, table: int, array: m.Array, rate: float) -> None:
        """See `Client.push`."""
        self.do(self.session.push(table, self.session.on_the_wire(table, array), rate))

    def push_sums(self, table: int, gradient: Callable[[int], m.Array], rate: float) -> None:
        """Push the sums of the nodes of this worker's host.

        Args:
            table: index of the table.
            gradient: returns the gradient of a virtual worker.
            rate: the learning rate.
        """
        store = self.session.store
        host = self.session.seat.host
        nodes = store.nodes(store.tables[table], host)
        tree = TreeSum[m.Array](store.placed.count, lambda left, right, at: left + right)
        for number in store.placed.of(host):
            node, part = Node(number, number + 1), gradient(number)
            if node not in nodes:
                node = tree.put(node, part)
                if node not in nodes:
                    continue
                part = tree.parts.pop(node)
            self.push(table, part, rate)

    def tick(self) -> None:
        """See `Client.clock`."""
        self.do(self.session.tick())

    def gather(self, payload: bytes, *, whole: bool = True) -> Waits:
        """See `Client.gather`; wait for the result."""
        tag, outgoing = self.session.gather(payload, whole=whole)
        self.do(outgoing)
        return (
            yield from self.wait_for(
                lambda: self.session.collections[whole].take(tag), f"collection {tag}"
            )
        )

    def signal(self, kind: m.SignalKind) -> m.Signal:
        """See `Client.signal`."""
        signal, outgoing = self.session.signal(kind)
        self.do(outgoing)
        return signal

    def renew(self, start_clock: int) -> Waits:
        """See `Client.renew`."""
        yield from self.gather(b"")
        self._pending = [s.kind for s in self.session.signals.all] if self.rank == 0 else []
        self.session = self._pump.session = self.session.renewed(start_clock)

    def replace_trial(self, store: StoreSpec) -> Waits:
        """See `Client.replace_trial`."""
        yield from self.gather(b"")
        self.session = self.session.replaced(store)
        self._pump.follow(self.session)

    def rows(self, table: int, rows_N: m.RowIds) -> Waits:
        """Request rows of a row table, and wait for them."""
        number, sent = self.session.rows.request(table, rows_N)
        self.do(sent)
        return (yield from self.wait_for(lambda: self.session.rows.take(number), f"rows {number}"))

    def close(self, *, leave: bool = True) -> Waits:
        """See `Client.close`."""
        if leave and self.monitor.failure is None:
            self.do(self.session.leave())
        self.monitor.close()
        self._end.wake()
        yield Question(lambda: True if self._gone else None, "its last messages", TIMEOUT_S)

    @property
    def queued(self) -> int:
        """Messages that wait to be sent."""
        return sum(map(len, self._pump.queues))
