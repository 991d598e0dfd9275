"""The session of one worker with the store.

A state machine without I/O: calls and messages in, messages out.

Laws:

* A worker pushes and reads the tables of its own plane (`seats.py`). "All workers" of a table are the
  workers of its plane. A worker that is in no plane is a member like any other, without tables.
* Read: a table may be read at clock c only when every chunk has reached c - s (`clock.py`).
* Read my writes: at staleness > 0 a value holds the worker's own changes, too. The session adds
  those that the shard had not yet added when it sent the value, from the log of own changes.
* A renewed session (`renewed`) ignores the `Signal`s of a shard until that shard's `Welcome` to it:
  before it they may be of the previous session.
* A pushed array is held, and must not be written to, until the shard has it: at staleness 0 until
  the next value of its chunk arrives, at staleness > 0 until a value that includes it arrives.
* A table of staleness 0 may be bound to its reader's array (`values.py`).
* Where a quorum of the workers ends a round (`quorum.py`), an iteration of this worker is its part
  of a round. It counts in the round that is open when it comes, whose clock it continues from.
* With table clocks each table of staleness 0 counts its own pushes: a worker pushes a table when it
  likes, all workers equally often, and a read needs all that the worker has pushed to the table.
  The shards know each chunk's own clock anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ps_server.errors import LocalProtocolError, PeerLeft, RemoteProtocolError, SpecError
from ps_server.protocol import messages as m
from ps_server.protocol.asked_history import AskedHistory
from ps_server.protocol.bandwidth import ChangeLog
from ps_server.protocol.clock import needed_clock
from ps_server.protocol.collections_and_signals import WorkerCollections, WorkerSignals
from ps_server.protocol.norm import WorkerNorm
from ps_server.protocol.placement import Chunk, place
from ps_server.protocol.quorum import WorkerRounds
from ps_server.protocol.settings import Consistency, Keeping, Precision, StoreSpec, TableSpec
from ps_server.protocol.values import ChunkCopy, Held, WorkerValues, check_array
from ps_server.protocol.worker_pushes import Parts, PushEncoder, SentChanges
from ps_server.protocol.worker_rows import WorkerRows
from ps_server.rules import history_count

InitialValue = Callable[[int], Sequence[m.Payload]]
"""Maps the index of a table to [first value, history, ...], flat; the value as workers hold it, all
others float32.
"""


class Session:
    """The session of one worker with all shards.

    Args:
        rank: this worker's rank.
        store: the store, the same on every worker.
        token: the job's secret.
        log: under `SSPAggr`, holds changes back (`bandwidth.py`); None: every change is sent at
            once.
        table_clocks: whether each table has a clock of its own.
    """

    def __init__(
        self,
        rank: int,
        store: StoreSpec,
        token: bytes = b"",
        *,
        log: ChangeLog | None = None,
        table_clocks: bool = False,
    ) -> None:
        if not 0 <= rank < store.workers:
            raise SpecError(f"rank is {rank}; expected 0 to {store.workers - 1}")
        table_clocks = table_clocks or store.trial
        if table_clocks and (
            store.clip is not None or any(table.staleness for table in store.tables)
        ):
            raise SpecError(
                "tables with clocks of their own have staleness 0 and no limit on a common norm"
            )
        self._table_clocks = table_clocks
        self.seat = store.seats.of(rank)
        self.own_tables = tuple(
            table for table, spec in enumerate(store.tables) if spec.plane == self.seat.local_rank
        )
        """The tables of this worker's plane."""
        self.store = store
        self.clock = store.start_clock
        self.signals = WorkerSignals(rank)
        members = len(store.seats.members(self.seat.local_rank))
        self.collections = {
            True: WorkerCollections(store.workers),
            False: WorkerCollections(members, whole=False),
        }
        """Among all workers, and among those with this worker's local rank."""
        self.rows = WorkerRows(store.shards)
        log = log if store.consistency is Consistency.SSP_AGGR else None
        chunks = place(store).chunks
        self.values = WorkerValues(store, chunks, self.own_tables, log)
        self.changes = SentChanges(store, self.values, log)
        self._encoder = PushEncoder(store, self.seat.host, chunks, self.own_tables)
        self.rounds = WorkerRounds(rank, store.shards) if store.quorum else None
        self._hello: m.Hello | None = m.Hello(rank, token)
        """What `start` sends first; None: the shards know this worker."""
        self.stays_on: set[int] | None = None
        """Shards that have not answered the `Leave` of this session; None: it has not left."""
        self._started = False
        rows = zip(chunks, store.tables, strict=True)
        bulk = {c.shard for row, t in rows if t.follows_gradients for c in row}
        self.norm = WorkerNorm(self.seat, bulk, outside=store.outside_norm, clock=store.start_clock)

    def _own_copies(self) -> Iterator[tuple[ChunkCopy, TableSpec]]:
        for table in self.own_tables:
            for copy in self.values.copies[table]:
                yield copy, self.store.tables[table]

    def _own(self, table: int) -> TableSpec:
        """Return the description of a table of this worker's plane.

        Raises:
            LocalProtocolError: it is another plane's.
        """
        spec = self.store.tables[table]
        if spec.plane != self.seat.local_rank:
            raise LocalProtocolError(
                f"table '{spec.name}' belongs to plane {spec.plane}; worker {self.seat.rank} pushes and "
                f"reads tables of plane {self.seat.local_rank} only"
            )
        return spec

    def start(self, initial: InitialValue) -> list[m.Addressed]:
        """Join every shard and agree on the store; workers of host 0 send the first values of
        their tables.

        Args:
            initial: returns a table's first value, and its history when a run is resumed; called on
                host 0.
        """
        outgoing: list[m.Addressed] = []
        self._started = True
        for shard in range(self.store.shards):
            if self._hello is not None:
                outgoing.append(m.Addressed(shard, self._hello))
            outgoing.append(m.Addressed(shard, m.Create(self.store)))
        if self.seat.host == 0:
            for table in self.own_tables:
                arrays = self._checked_initial(table, initial(table))
                for chunk in self.values.chunks[table]:
                    parts = [array[chunk.start : chunk.stop] for array in arrays]
                    outgoing.append(m.Addressed(chunk.shard, m.Initial(table, chunk.index, parts)))
        return outgoing

    def renewed(self, start_clock: int) -> Session:
        """Return a session on the same connections, whose store starts again at a different clock.

        All workers have taken part in a collection since their last message, and none has pushed.
        Rank 0's signals are forgotten: it sends them again once the session has started.
        """
        if any(copy.pushed != self.store.start_clock for row in self.values.copies for copy in row):
            raise LocalProtocolError("a store is renewed only before its first push")
        return self._followed_by(replace(self.store, start_clock=start_clock), self._table_clocks)

    def replaced(self, store: StoreSpec) -> Session:
        """Return a session on the same connections with another store, after a trial.

        All workers have read what follows from their last pushes, and taken part in a collection
        since.
        """
        same = store.shards == self.store.shards and store.hosts == self.store.hosts
        if not self.store.trial or not same:
            raise LocalProtocolError(
                "only a trial store is replaced, by one of the same hosts on the same shards"
            )
        if any(copy.clock != copy.pushed for row in self.values.copies for copy in row):
            raise LocalProtocolError(
                "a trial store is replaced only when all that was pushed has been read"
            )
        return self._followed_by(store, table_clocks=False)

    def _followed_by(self, store: StoreSpec, table_clocks: bool) -> Session:
        session = Session(self.seat.rank, store, log=self.changes.log, table_clocks=table_clocks)
        session._hello = None
        session.collections = self.collections  # numbers go on
        session.rows = self.rows
        session.signals = self.signals.renewed()
        return session

    def _checked_initial(self, table: int, arrays: Sequence[m.Payload]) -> Sequence[m.Payload]:
        spec = self.store.tables[table]
        count = history_count(spec.rule.kind) if spec.follows_gradients else 0
        allowed = {1, 1 + count, 1 + count + spec.has_own_value}
        if len(arrays) not in allowed:
            raise LocalProtocolError(
                f"table '{spec.name}' got {len(arrays)} initial arrays; expected {allowed}"
            )
        for number, array in enumerate(arrays):
            check_array(spec, array, Precision.FLOAT32 if number else spec.held_as)
        return arrays

    def bind(self, table: int, out: m.Payload) -> None:
        """Let the values of a table be written to `out` when they come; see `WorkerValues.bind`."""
        self._own(table)
        self.values.bind(table, out)

    def held_back(self, table: int) -> Mapping[int, m.Array]:
        """Return for each virtual worker of this worker's host the sum of what was pushed to a
        table, less what its codec has sent; empty without one. Live memory.
        """
        return self._encoder.held_back(table)

    def on_the_wire(self, table: int, array: m.Payload) -> m.Payload | Parts:
        """Return what to `push`: a gradient or change as it is, rounded, encoded, or without rows
        of zeros.

        Call it once for each push, in their order.

        Only the thread that pushes the table may call it, at the same time as any other method.
        """
        self._own(table)
        return self._encoder.encode(table, array, self.clock_of(table))

    def push(self, table: int, array: m.Payload | Parts, rate: float) -> list[m.Addressed]:
        """Send the result of `on_the_wire` for this iteration's gradient or change of a table:
        once for each of its host's nodes, from left to right.

        An empty array skips the iteration: the value stays as it is
        (`TableSpec.may_skip`). All workers skip it or none.
        """
        spec = self._own(table)
        parts = array if isinstance(array, tuple) else self._encoder.cut(table, array)
        if spec.keeping is Keeping.COPY:
            raise LocalProtocolError(f"table '{spec.name}' is a copy: no worker pushes to it")
        outgoing = []
        clock, nodes = self.clock_of(table), self._encoder.nodes[table]
        for copy in self.values.copies[table]:
            if copy.pushed != clock or (self._table_clocks and copy.clock < copy.pushed):
                raise LocalProtocolError(
                    f"table '{spec.name}' was already pushed in iteration {clock}"
                )
        for copy, part in zip(self.values.copies[table], parts, strict=True):
            chunk = copy.chunk
            copy.nodes = (copy.nodes + 1) % nodes
            complete = int(copy.nodes == 0)
            copy.pushed += complete
            if self.changes.log is not None and spec.adds_changes:
                self.changes.log.add((table, chunk.index), clock, np.asarray(part, np.float32))
            else:
                copy.sent += complete
                copy.held.append(Held(part, complete))
                outgoing.append(
                    m.Addressed(chunk.shard, m.Push(table, chunk.index, clock, rate, part))
                )
        return outgoing

    def skip(self, table: int) -> list[m.Addressed]:
        """Skip the iteration of a table: see `push`."""
        nothing = np.zeros(0, np.float32)
        return [
            sent
            for _ in range(self._encoder.nodes[table])
            for sent in self.push(table, nothing, 0.0)
        ]

    def tick(self) -> list[m.Addressed]:
        """Finish an iteration.

        Every table of this plane must have been pushed, unless each has a clock of its own.
        """
        for table in () if self._table_clocks else self.own_tables:
            spec, copy = self.store.tables[table], self.values.copies[table][0]
            if spec.keeping is not Keeping.COPY and copy.pushed != self.clock + 1:
                raise LocalProtocolError(
                    f"iteration {self.clock} ends without a push of table '{spec.name}'"
                )
        self.clock += 1
        if self.rounds is not None:
            return self.rounds.end()
        if self.changes.log is None:
            return self.changes.tell(self.clock)
        # A worker with as many finished iterations as this one does not wait for what is held back.
        return self._send_due(lambda table: needed_clock(self.clock + 1, table.staleness))

    def _send_due(self, before: Callable[[TableSpec], int]) -> list[m.Addressed]:
        return self.changes.send_due(before, self.clock)

    def describe_part(self, weight: float, payload: bytes, *, whole: bool) -> None:
        """Describe the part that the next `tick` ends, where a quorum ends a round; see `Part`."""
        if self.rounds is None:
            raise LocalProtocolError("this store has no quorum: all workers end each iteration")
        self.rounds.describe(m.Part(self.clock, weight, whole, payload))

    @property
    def is_awaited(self) -> bool:
        """Whether a quorum waits for this worker's part."""
        return self.rounds is not None and self.rounds.is_awaited(self.clock)

    def end_round(self) -> m.Round | None:
        """Return the round in which this worker's part has counted, once its values are here, and
        continue from its clock; None before.
        """
        ended = None if self.rounds is None else self.rounds.ended
        if self.rounds is None or ended is None:
            return None
        clock = ended.clock + 1
        pushed = [copy for copy, spec in self._own_copies() if spec.keeping is not Keeping.COPY]
        if any(copy.clock < clock for copy in pushed):
            return None
        self.rounds.ended = None
        self.clock = clock
        for copy in pushed:
            copy.own = copy.sent = copy.pushed = clock
        return ended

    def ask(self, table: int, staleness: int | None = None) -> list[m.Addressed]:
        """Ask for the chunks that are too old to be read, under `SSP`.

        Under `SSPPush` the shards send them unasked.

        Under `SSPAggr` with a bound of the reader's own: all workers read so, and need what this
        one holds back.
        """
        spec = self._own(table)
        if staleness is not None and self.changes.log is not None and spec.adds_changes:
            return self._send_due(lambda other: self.clock - staleness)
        if self.store.consistency is not Consistency.SSP or spec.keeping is Keeping.COPY:
            return []
        needed = self._needed(table, staleness)
        outgoing = []
        for copy in self.values.copies[table]:
            if copy.clock < needed and copy.requested < needed and copy.clock >= 0:
                copy.requested = needed
                outgoing.append(
                    m.Addressed(copy.chunk.shard, m.Get(table, copy.chunk.index, needed))
                )
        return outgoing

    def ask_history(
        self, table: int, arrays: Sequence[m.Array] | None = None
    ) -> tuple[AskedHistory, list[m.Addressed]]:
        """Ask for the history of a table of staleness 0, after a read of what follows from this
        worker's last push, and before its next one. Of a table of another plane: the same holds for
        the worker of that plane on this host.

        Args:
            table: index of the table.
            arrays: to be written to; None: new ones.
        """
        if not self.store.tables[table].follows_gradients:
            raise LocalProtocolError(
                f"table '{self.store.tables[table].name}' has its history on the workers"
            )
        size, count = self.store.tables[table].size, self.values.history_arrays(table)
        if arrays is None or len(arrays) != count:
            arrays = [np.empty(size, np.float32) for _ in range(count)]
        asked = self.values.ask_history(table, arrays)
        chunks = self.values.chunks[table] if count else ()
        return asked, [m.Addressed(c.shard, m.GetHistory(table, c.index)) for c in chunks]

    def gather(
        self, payload: bytes, *, keeps: bool = True, whole: bool = True
    ) -> tuple[int, list[m.Addressed]]:
        """Contribute to the next collection, of all workers or of those with this worker's local
        rank; see `WorkerCollections`. Return its number.
        """
        gather = self.collections[whole].contribute(payload, keeps=keeps)
        return gather.tag, [m.Addressed(0, gather)]

    def signal(self, kind: m.SignalKind) -> tuple[m.Signal, list[m.Addressed]]:
        """Signal all workers, this one too, to do `kind` after an iteration that none of them
        has passed. Rank 0 only.

        The pushes of this worker in iteration `clock` may have been sent already, though the
        iteration has not ended. So another worker can have read its tables for iteration clock + s
        + 1, and finished it, before the signal reaches it. For the next iteration it needs this
        worker's next push, and each shard passes the signal on before any value with that push. So
        the end of iteration clock + s + 2 is the first that all can stop at: clock + s + 3
        iterations are finished then.
        """
        of_rows = [spec.staleness for spec in self.rows.specs]
        lead = max([0, *of_rows, *(table.staleness for table in self.store.tables)])
        signal = self.signals.send(kind, self.clock + lead + 3)
        return signal, [m.Addressed(shard, signal) for shard in range(self.store.shards)]

    def leave(self) -> list[m.Addressed]:
        """Leave every shard, after the changes that are held back. Each answers
        once it has all that was sent before.
        """
        self.stays_on = set(range(self.store.shards)) if self._started else set()
        rest = self._send_due(lambda table: self.clock + 1)
        return [*rest, *(m.Addressed(shard, m.Leave()) for shard in range(self.store.shards))]

    def receive(self, shard: int, message: m.Message) -> list[m.Addressed]:
        """Take one message of a shard. Return the answers to send.

        Raises:
            RemoteProtocolError: the shard refused a message of this worker, or broke the protocol.
            PeerLeft: another worker has left before this one has finished.
        """
        match message:
            case m.Value():
                self.values.receive(shard, message)
            case m.Taken() if self.rounds is not None:
                return self.rounds.taken(shard)
            case m.Awaited() if shard == 0 and self.rounds is not None:
                self.rounds.await_part(message)
            case m.Round() if shard == 0 and self.rounds is not None:
                return self.rounds.receive(message)
            case m.Fresh(clock):
                self.values.receive_fresh(shard, clock)
            case m.Welcome(index) if index == shard:
                self.signals.welcome(shard)  # all other messages are sent without waiting for it
            case m.PartialNorm(clock, _) if self.norm.expects_partial(shard, clock):
                return self.norm.add_partial(shard, message)
            case m.OutsideNorm() if self.norm.expects_outside(shard, message):
                return self.norm.put_outside(message)
            case m.TotalNorm(clock, _) if self.norm.expects_total(shard, clock, now=self.clock):
                self.norm.put_total(message)
            case m.History():
                self.values.receive_history(shard, message)
            case m.Rows():
                self.rows.receive_rows(shard, message)
            case m.KeptRows():
                self.rows.receive_kept(shard, message)
            case m.Gathered() if self.collections[message.whole].expects(message):
                self.collections[message.whole].receive(message)
            case m.Leave() if self.stays_on is not None:
                self.stays_on.discard(shard)
            case m.Signal() if self.seat.rank != 0:
                self.signals.receive(shard, message)
            case m.Fault(reason):
                raise RemoteProtocolError(
                    f"shard {shard} refused a message of worker {self.seat.rank}: {reason}"
                )
            case m.Gone(worker, iterations) if (
                worker != self.seat.rank and worker < self.store.workers
            ):
                raise PeerLeft(worker, iterations, rank=self.seat.rank)
            case _:
                raise RemoteProtocolError(
                    f"shard {shard} sent an unexpected {type(message).__name__}"
                )
        return []

    def _needed(self, table: int, staleness: int | None) -> int:
        spec = self.store.tables[table]
        if spec.keeping is Keeping.COPY:
            return 0
        clock = self.clock_of(table)
        return max(needed_clock(clock, spec.staleness if staleness is None else staleness), 0)

    def clock_of(self, table: int) -> int:
        """Return the clock of the next push to a table."""
        return self.values.copies[table][0].pushed if self._table_clocks else self.clock

    def missing(self, table: int, staleness: int | None = None, *, first: int = 0) -> Chunk | None:
        """Return the first chunk of a table of this plane that is too old to be read now, or None.

        Args:
            table: the table.
            staleness: a bound to use in place of the table's own; 0 reads the updates
                of all workers' finished iterations.
            first: the chunk to begin with; those before it are fresh enough.
        """
        return self.values.missing(table, self._needed(table, staleness), first=first)
