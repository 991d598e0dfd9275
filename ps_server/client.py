"""A worker's handle on the store: blocking reads, pushes that return at once.

The thread of `Pump` owns the sockets and moves messages between transport and `Session`. Calls hold
the client's monitor for as long as a look-up takes. All methods are safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from ps_server.client_rows import ClientRows
from ps_server.collection import Collection, Coming
from ps_server.errors import SpecError
from ps_server.network import Network
from ps_server.protocol.bandwidth import ChangeLog
from ps_server.protocol.messages import Addressed, Array, Payload, Round, Signal, SignalKind
from ps_server.protocol.placement import Placement, place
from ps_server.protocol.precision import add
from ps_server.protocol.schedule import LinkPriority
from ps_server.protocol.settings import StoreSpec
from ps_server.protocol.worker_session import InitialValue, Session
from ps_server.pump import Pump
from ps_server.shared_memory import WorkerSharedMemory
from ps_server.statistics import ClientStatistics
from ps_server.trace import NO_TRACE, Tracer
from ps_server.transport.base import ClientTransport
from ps_server.transport.zmq_sockets import ZmqWire

T = TypeVar("T")


ComingHistory = Coming[list[Array]]
"""The arrays of a table's history on their way."""


class Client:
    """One worker's connection to every shard.

    Args:
        shards: the shards' addresses, in shard order; or a transport (tests).
        network: this worker's rank, and how it reaches the shards.
        store: the store, the same on every worker.
        trace: records each message sent and received; its owner closes it.
        share_memory: whether large arrays reach shards of this host in memory in
            place of a socket (`shared_memory.py`).
        bandwidth_mbps: under `SSPAggr`: Mb/s for changes that the bound does not need yet; they
            wait, added up, and the most important leave first (`bandwidth.py`). None: all leave at
            once.
        table_clocks: whether each table has a clock of its own, which counts its pushes
            (`worker_session.py`).
        memory_for: the largest store that may follow a trial, which shares its memory; None:
            `store`.

    Attributes:
        rows: the row tables, which are created once the store has started.
        norm_parts: how often `add_norm` is called in an iteration.

    Raises:
        SpecError: the store has another number of shards, or fewer workers than the rank needs.
        TransportError: an address is not one, or there are no sockets left.

    Example::

        client = Client(["tcp://127.0.0.1:5555"], Network(), store)
        client.start(lambda table: [weights])
        for _ in range(iterations):
            client.read(0, weights)
            client.push(0, gradient(weights), rate=0.1)
            client.clock()
        client.read(0, weights)
        client.barrier()
        client.close()
    """

    def __init__(
        self,
        shards: Sequence[str] | ClientTransport,
        network: Network,
        store: StoreSpec,
        *,
        trace: Tracer = NO_TRACE,
        share_memory: bool = True,
        bandwidth_mbps: float | None = None,
        table_clocks: bool = False,
        memory_for: StoreSpec | None = None,
    ) -> None:
        if isinstance(shards, Sequence) and len(shards) != store.shards:
            raise SpecError(
                f"the store has {store.shards} shards, but {len(shards)} addresses were given; "
                "give one for each shard"
            )
        limit = network.connect_limit([f"shard {shard}" for shard in range(store.shards)])
        wire = network.wire or ZmqWire(limit)
        log = None if bandwidth_mbps is None else ChangeLog(bandwidth_mbps, wire.now())
        self._shared_memory = WorkerSharedMemory(
            shards if share_memory and isinstance(shards, Sequence) else ()
        )
        self._monitor = network.new_monitor(
            closed="the client is closed", hangs=": a worker or a shard hangs"
        )
        self._memory_for: StoreSpec | None = memory_for or store
        """The store whose arrays pass in shared memory; None: memory was offered."""
        self._pending: tuple[SignalKind, ...] = ()
        self.norm_parts = 1
        self._squares: dict[int, list[Sequence[float]]] = {}
        self._pump = Pump(
            Session(network.rank, store, network.token, log=log, table_clocks=table_clocks),
            wire.connect(shards, network.keys) if isinstance(shards, Sequence) else shards,
            self._shared_memory,
            self._monitor,
            trace,
            clock=wire.now,
        )
        self.rows = ClientRows(self._call, self._monitor, lambda: self._pump.session.rows)
        self._pump.start()

    def start(self, initial: InitialValue) -> None:
        """Join the job; returns when the first value of each of this worker's tables has come.

        Args:
            initial: called on host 0 only (without hosts: by rank 0), for this worker's tables:
                table id -> [first value] or [first value, *history].

        Raises:
            StalenessTimeout: a shard or another worker did not join in time.
            RemoteProtocolError: a shard refused the store: the workers' definitions differ.
        """
        self._do(lambda: [*self._pump.session.start(initial), *self._offer_memory()])
        for table in self._pump.session.own_tables:
            self._until_fresh(table, None)
        for kind in self._pending:
            self.signal(kind)
        self._pending = ()

    def renew(self, start_clock: int) -> None:
        """Let the store begin again at a different clock: `bind` and `start` follow, as
        at first. All workers call it together: it waits for a collection of all.

        Before the first push only. Rank 0 sends its signals so far again once the store has
        started.

        Args:
            start_clock: the iteration that the new first values belong to.
        """
        self.gather().result()  # from here on no value of the old store is on its way
        with self._monitor:
            self._monitor.check()
            kinds = [signal.kind for signal in self._pump.session.signals.all]
            self._pending = tuple(kinds) if self.rank == 0 else ()
            self._pump.session = self._pump.session.renewed(start_clock)
            self._memory_for = None

    def replace_trial(self, store: StoreSpec) -> None:
        """Let another store follow a trial: `bind` and `start` follow, as at first.

        All workers call it together: it waits for a collection of all.

        Each has read what follows from its last push of each table.
        """
        self.gather().result()
        with self._monitor:
            self._monitor.check()
            self._pump.follow(self._pump.session.replaced(store))
            self._memory_for = None

    def bind(self, table: int, out: Payload) -> None:
        """Let the values of a table of staleness 0 be written to `out` the moment they come.

        From then on `out` belongs to this client from each push of the table until the next `read`
        of it has returned. Call it before `start`.

        Args:
            table: table id.
            out: flat, of the table's size and of the type that workers hold (`TableSpec.held_as`).
        """
        with self._monitor:
            self._pump.session.bind(table, out)

    def push(self, table: int, array: Payload, *, rate: float = 0.0) -> None:
        """Send this iteration's gradient (staleness 0) or change (staleness > 0) of a table;
        returns at once. With several virtual workers: the sum of each of this host's nodes
        (`StoreSpec.nodes`), one after another.

        Args:
            table: table id.
            array: flat, of the table's size, and float32 or what workers hold. Must not be written to until the next `read` of
                this table has returned (staleness 0), or at all (staleness > 0). The caller adds a
                change to the array that it reads to, too.
            rate: the solver's rate of this iteration (staleness 0); the same on every worker.
        """
        self._pump.meter.pushed(table)
        payload = self._pump.session.on_the_wire(table, array)
        self._do(lambda: self._pump.session.push(table, payload, rate))
        if self._pump.session.changes.log is not None:
            self._pump.wake()

    def clock_of(self, table: int) -> int:
        """Return the clock of the next push to a table, once all earlier ones are begun."""
        with self._monitor:
            return self._pump.session.clock_of(table)

    def push_encoded(self, table: int, array: Payload, *, rate: float) -> None:
        """Send a gradient that the caller has rounded or encoded; see `push`.

        Args:
            array: as it travels: flat, of 16 bits, or the bytes of the codec chunk after chunk. The
                caller holds back what was not sent.
        """
        self._pump.meter.pushed(table)
        self._do(lambda: self._pump.session.push(table, array, rate))

    def skip(self, table: int) -> None:
        """Push nothing in this iteration to a table of means: its value stays.

        All workers skip it, or none.
        """
        self._do(lambda: self._pump.session.skip(table))

    def yield_link(self, link: LinkPriority) -> None:
        """Let pushes to shards of other hosts wait while another sender has taken this host's link.

        Messages that may not overtake them wait, too; `close` waits for nothing.
        """
        self._pump.yield_link(link)

    def clock(self) -> None:
        """Finish an iteration.

        Each of this worker's tables must have been pushed in it, unless each has a clock of its own.
        """
        self._do(self._pump.session.tick)
        self._pump.hurry()

    def describe_part(self, weight: float, payload: bytes, *, whole: bool) -> None:
        """Describe this worker's part of a round, which the next `clock` ends. Where a quorum ends a
        round, in each (`quorum.py`).

        Args:
            weight: in the average of the round; at least 0.
            payload: for all workers whose parts count in the same round.
            whole: whether that round waits for all workers.
        """
        with self._monitor:
            self._pump.session.describe_part(weight, payload, whole=whole)

    @property
    def is_awaited(self) -> bool:
        """Whether a quorum of the workers waits for this one's part of a round."""
        with self._monitor:
            return self._pump.session.is_awaited

    def end_round(self) -> Round:
        """Wait for the round in which this worker's part counts, and for its values; the next part
        follows from them. Return whose parts have counted.
        """
        return self._monitor.wait_for(
            self._pump.session.end_round, "the round of this worker's part did not end"
        )

    def request(self, table: int) -> None:
        """Under `SSP`: ask for what the next `read` of this table will need, ahead of it."""
        self._do(lambda: self._pump.session.ask(table))

    def read(self, table: int, out: Payload, *, staleness: int | None = None) -> None:
        """Bring `out` up to date; waits until the staleness bound allows it.

        Args:
            table: table id.
            out: as of `bind`; the same array at every call, as only pieces that
                have come since the last call are written. Nothing is written to the array that was
                bound (`bind`).
            staleness: a bound to use in place of the table's own; 0 waits for all workers; -1,
                after a push of a table of staleness 0, for the value that follows from it.

        Raises:
            StalenessTimeout: the value did not become fresh in time.
        """
        began_s = self._pump.meter.now()
        self._until_fresh(table, staleness)
        self._pump.meter.waited(table, began_s)
        with self._monitor:
            pieces = self._pump.session.values.take(table)
        for piece in pieces:
            view = out[piece.start : piece.stop]
            np.copyto(view, piece.value)
            for change in piece.changes:
                add(np.asarray(view, np.float32), change)

    def history(self, table: int) -> list[Array]:
        """Return the history that the shards keep for a table of staleness 0.

        A table with a codec of values has one array more: the shards' own value, which the workers'
        value follows; for a mean what was not sent of it. `start` takes the same arrays.
        """
        return self.ask_history(table).result()

    def ask_history(self, table: int, arrays: Sequence[Array] | None = None) -> ComingHistory:
        """Ask for what `history` returns as it is now; returns at once.

        It comes behind all values that other workers or this one wait for. Call it when what
        follows from the last push of the table has been read, and before the next push: by this
        worker, or, for a table of another plane, by the worker of that plane on this host.

        Args:
            table: table id.
            arrays: flat float32 of the table's size, to be written to as the history comes; None:
                new ones.
        """
        asked = self._call(lambda: self._pump.session.ask_history(table, arrays))
        return ComingHistory.guarded(
            self._monitor,
            lambda: None if asked.arrays is None else list(asked.arrays),
            f"the history of table {table} did not arrive",
        )

    def held_back(self, table: int) -> Mapping[int, Array]:
        """Return what a table's codec has not sent of this worker's pushes, by virtual worker;
        empty without a codec of gradients, and for a table of another plane.

        It is live memory, to which a resumed run may write before its first push.
        """
        return self._pump.session.held_back(table)

    def add_norm(self, clock: int, squares: Sequence[float]) -> None:
        """Add numbers whose sum is the sum of squares of iteration `clock`'s gradients outside the
        store that this worker's plane applies; returns at once. The workers of host 0 call it, in
        each plane of `StoreSpec.outside_norm`, `norm_parts` times an iteration.
        """

        def add() -> list[Addressed]:
            parts = self._squares.setdefault(clock, [])
            parts.append(squares)
            if len(parts) < self.norm_parts:
                return []
            return self._pump.session.norm.add_outside(clock, [*chain(*self._squares.pop(clock))])

        self._do(add)

    def total_norm(self, clock: int) -> float:
        """Wait for the sum of squares over all gradients of iteration `clock`, in
        the store and outside it, and return it. For workers of the planes of
        `StoreSpec.outside_norm`.
        """
        self._pump.hurry()
        return self._monitor.wait_for(
            lambda: self._pump.session.norm.total(clock),
            f"the gradients' norm of iteration {clock} did not arrive",
        )

    def gather(self, payload: bytes = b"", *, keeps: bool = True, whole: bool = True) -> Collection:
        """Contribute to the next collection.

        Each worker that takes part must do so in each, in the same order; collections of all workers
        and those of a plane have no common order.

        Args:
            payload: the contribution.
            keeps: whether this worker needs the payloads; otherwise it gets none.
            whole: whether all workers take part; otherwise those of this worker's plane, or, where
                it is in none, those with its local rank. The payloads are in the order of ranks,
                and so of hosts.
        """
        tag = self._call(lambda: self._pump.session.gather(payload, keeps=keeps, whole=whole))
        return Collection.guarded(
            self._monitor, lambda: self._pump.session.collections[whole].take(tag)
        )

    def barrier(self) -> None:
        """Wait until every worker of this worker's plane has called this; without hosts, every
        worker.
        """
        self.gather(whole=False).result()

    def signal(self, kind: SignalKind) -> Signal:
        """Make all workers do `kind` after the iteration that the returned signal names. Rank 0."""
        return self._call(lambda: self._pump.session.signal(kind))

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The signals of rank 0 so far."""
        with self._monitor:
            self._monitor.check()
            return tuple(self._pump.session.signals.all)

    def await_signals(self, count: int) -> None:
        """Wait until this worker has received so many signals, as a peer has."""
        self._monitor.wait_for(
            lambda: True if len(self._pump.session.signals.all) >= count else None,
            "a signal of rank 0 did not come",
        )

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._pump.session.seat.rank

    @property
    def host(self) -> int:
        """The number of this worker's host; its rank where `StoreSpec.hosts` is empty."""
        return self._pump.session.seat.host

    @property
    def own_tables(self) -> tuple[int, ...]:
        """The tables of this worker's plane."""
        return self._pump.session.own_tables

    @property
    def iterations(self) -> int:
        """This worker's clock."""
        return self._pump.session.clock

    def statistics(self) -> ClientStatistics:
        """Return what has been sent and waited for so far."""
        row_tables = [spec.name for spec in self._pump.session.rows.specs]
        return self._pump.meter.statistics(self._pump.session.clock, row_tables)

    def close(self, *, leave: bool = True) -> None:
        """Leave the job, send what is queued, and disconnect; every wait ends with an error.
        After an interruption it drops what is queued.

        Safe to call twice. Nothing is written to bound arrays once it has returned.
        """
        with self._monitor:
            if self._monitor.closed:
                return
            if leave and self._monitor.failure is None:
                self._pump.add(self._pump.session.leave())
            self._monitor.close()
        self._pump.close()
        self._shared_memory.close()

    def _call(self, call: Callable[[], tuple[T, list[Addressed]]]) -> T:
        with self._monitor:
            self._monitor.check()
            result, outgoing = call()
            is_due = self._pump.add(outgoing)
        if outgoing and is_due:
            self._pump.wake()
        return result

    def _do(self, call: Callable[[], list[Addressed]]) -> None:
        self._call(lambda: (None, call()))

    def _until_fresh(self, table: int, staleness: int | None) -> None:
        session = self._pump.session
        name = session.store.tables[table].name
        self._do(lambda: session.ask(table, staleness))
        self._pump.hurry()
        first = 0

        def fresh() -> bool | None:
            nonlocal first  # a chunk that is fresh enough stays so: most are looked at once
            chunk = session.missing(table, staleness, first=first)
            first = first if chunk is None else chunk.index
            return True if chunk is None else None

        self._monitor.wait_for(
            fresh, f"table '{name}' did not become fresh enough for iteration {session.clock}"
        )

    def _offer_memory(self) -> list[Addressed]:
        if self._memory_for is None:
            return []
        chunks = zip(place(self._memory_for).chunks, self._memory_for.tables, strict=True)
        plane = self._pump.session.seat.local_rank
        own = Placement([row if table.plane == plane else () for row, table in chunks])
        offers = self._shared_memory.offers(own.of_shard)
        return [Addressed(shard, offer) for shard, offer in offers.items()]
