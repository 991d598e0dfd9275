"""The values of the tables of a worker's plane: a copy of each chunk, and what a reader gets of it.

Laws:

* A value is written to the array of its reader (`bind`) when it arrives: between a push of the
  table and the next read, when no thread reads the array.
* A copy counts iterations of own pushes from the store's first clock: `own` <= `sent` <= `pushed`.
  Pushes between `own` and `sent` are held, because a value that does not include them may still
  come. `Fresh` ends that too: all later values of the shard have the pushes of the iterations
  before its clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from ps_server.codecs.base import Coder
from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.asked_history import AskedHistory
from ps_server.protocol.bandwidth import ChangeLog
from ps_server.protocol.packed_rows import ChunkRows
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import (
    NUMPY_TYPES,
    add,
    key_of,
    of_values,
)
from ps_server.protocol.settings import Keeping, Precision, RuleKind, StoreSpec, TableSpec
from ps_server.rules import history_count

ENCODED: np.dtype[np.generic] = np.dtype(np.uint8)


class Piece(NamedTuple):
    """A reader's update of elements `start:stop`: set them to `value`, then add `changes`."""

    start: int
    stop: int
    value: m.Payload
    changes: tuple[m.Payload, ...]


class Held(NamedTuple):
    """A push that has left, with which the changes of so many iterations are complete."""

    array: m.Payload
    iterations: int


class ChunkCopy:
    """One chunk on one worker."""

    __slots__ = ("chunk", "clock", "held", "nodes", "own", "pushed", "requested", "sent", "unread")

    def __init__(self, chunk: Chunk, clock: int) -> None:
        self.chunk = chunk
        self.clock = -1  # no value has come
        self.own = clock  # own pushes that the last value includes, and each later one
        self.pushed = clock  # iterations of which all own pushes were made
        self.nodes = 0  # own pushes of the next one
        self.sent = clock  # own pushes that have left
        self.unread: m.Payload | None = None
        self.held: deque[Held] = deque()  # own pushes number own, own + 1, ..., sent - 1
        self.requested = -1  # the highest clock of a `Get`

    def includes(self, own: int) -> bool:
        """Return whether a value may include so many own pushes: pushes that have left, each as
        a whole.
        """
        at = self.own
        pushes = iter(self.held)
        while at < own and (push := next(pushes, None)) is not None:
            at += push.iterations
        return at == own


def check_array(
    spec: TableSpec, array: m.Payload, precision: Precision = Precision.FLOAT32
) -> None:
    """Check an array of this worker's program for a table.

    Raises:
        LocalProtocolError: its type or its shape is wrong.
    """
    if array.shape != (spec.size,) or array.dtype != NUMPY_TYPES[precision]:
        raise LocalProtocolError(
            f"table '{spec.name}' takes {spec.size} flat {precision.value}, "
            f"not {array.dtype} of shape {array.shape}"
        )


class WorkerValues:
    """See the module's docstring.

    Args:
        store: the store, the same on every worker.
        chunks: of each table.
        own: the tables of the worker's plane.
        log: changes that are held back; None: there are none.
    """

    def __init__(
        self,
        store: StoreSpec,
        chunks: Sequence[Sequence[Chunk]],
        own: Collection[int],
        log: ChangeLog | None,
    ) -> None:
        own = frozenset(own)
        self.copies = tuple(
            tuple(ChunkCopy(chunk, store.start_clock) for chunk in row if table in own)
            for table, row in enumerate(chunks)
        )
        """The copies of the chunks of each table; none of a table of another plane."""
        self.chunks = chunks
        self._adding = [
            [
                copy
                for row, table in zip(self.copies, store.tables, strict=True)
                for copy in row
                if copy.chunk.shard == shard and table.adds_changes
            ]
            for shard in range(store.shards)
        ]
        self._store = store
        self._log = log
        codecs = (table.value_codec for table in store.tables)
        self._coders = [None if codec is None else Coder(codec) for codec in codecs]
        self._bound: list[m.Payload | None] = [
            np.zeros(spec.size, np.float32) if table in own and self._sends_changes(spec) else None
            for table, spec in enumerate(store.tables)
        ]
        self._bound_outside = [False] * len(store.tables)
        self._fresh = [-1] * store.shards
        self._asked: list[deque[AskedHistory]] = [deque() for _ in store.tables]

    def _sends_changes(self, table: TableSpec) -> bool:
        return (
            table.value_codec is not None
            or of_values(self._store, table) is not Precision.FLOAT32
            or self._store.packs_rows(table)
        )

    def bind(self, table: int, out: m.Payload) -> None:
        """Let `land` write the values of a table of staleness 0 to `out`.

        Raises:
            LocalProtocolError: the table's staleness is above 0, it is a copy, or its first value
                has come.
        """
        spec = self._store.tables[table]
        check_array(spec, out, spec.held_as)
        if (
            spec.staleness > 0
            or spec.keeping is Keeping.COPY
            or any(c.clock >= 0 for c in self.copies[table])
        ):
            raise LocalProtocolError(
                f"table '{spec.name}' cannot be bound: only tables of staleness 0 can, before "
                "their first value"
            )
        self._bound[table] = out
        self._bound_outside[table] = True

    def land(self, shard: int, value: m.Value) -> None:
        """Write a value to the array that its table is bound to.

        Call `Session.receive` with the value afterwards.

        A reader of the table waits until that was called, so this method may run at the same time
        as any other.

        Raises:
            RemoteProtocolError: the value is not one that the shard may send now; nothing is
                written.
        """
        out = self._bound[value.table] if value.table < len(self._bound) else None
        if out is None:
            return
        copy = self._fitting(shard, value)
        if value.clock <= copy.clock or not value.array.size:
            return
        view = out[copy.chunk.start : copy.chunk.stop]
        if value.array.dtype == view.dtype:
            np.copyto(view, value.array)
            return
        own = np.asarray(view, np.float32)  # the same memory
        if (coder := self._coders[value.table]) is not None:
            encoded, key = value.array.view(np.uint8), key_of(copy.chunk, value.clock - 1)
            if self._store.tables[value.table].rule.kind is RuleKind.MEAN:
                coder.average(own, [encoded], key)
            else:
                coder.add(own, encoded, key)
        elif (rows := self._rows_of(copy.chunk)) is not None:
            if self._store.tables[value.table].rule.kind is RuleKind.MEAN:
                own.fill(0.0)
            rows.unpack(value.array.view(np.uint8), own)
        else:
            add(own, value.array)

    def receive(self, shard: int, value: m.Value) -> None:
        """Take a value of a shard.

        Raises:
            RemoteProtocolError: the value is not one that the shard may send now.
        """
        copy = self._fitting(shard, value)
        if value.clock < copy.clock:
            return
        while copy.own < value.own:
            copy.own += copy.held.popleft().iterations
        if self._log is not None and self._store.tables[value.table].adds_changes:
            self._log.value((value.table, value.chunk), np.asarray(value.array, np.float32))
        copy.clock = value.clock
        bound = self._bound[value.table]
        if not value.array.size:
            pass  # the value that has come before
        elif bound is None:
            # where a shard of this host keeps its value, the next one overwrites it
            copy.unread = value.array if value.array.flags.writeable else value.array.copy()
        elif not self._bound_outside[value.table]:
            copy.unread = bound[copy.chunk.start : copy.chunk.stop]

    def receive_fresh(self, shard: int, clock: int) -> None:
        """Note that the values of a shard have all changes of iterations before `clock`."""
        self._fresh[shard] = max(self._fresh[shard], clock)
        for copy in self._adding[shard]:
            if copy.unread is not None:
                continue  # its reader adds what it does not include
            while copy.held and copy.own + copy.held[0].iterations <= clock:
                copy.own += copy.held.popleft().iterations

    def history_arrays(self, table: int) -> int:
        """Return the number of arrays of a table's history."""
        spec = self._store.tables[table]
        count = history_count(spec.rule.kind) if spec.follows_gradients else 0
        return count + spec.has_own_value

    def ask_history(self, table: int, arrays: Sequence[m.Array]) -> AskedHistory:
        """Expect the history of a table, in these arrays: of a table of this plane at the clock of
        its values.
        """
        clock = next((copy.clock for copy in self.copies[table]), None)
        asked = AskedHistory(self.chunks[table], arrays, clock)
        if asked.arrays is None:
            self._asked[table].append(asked)
        return asked

    def receive_history(self, shard: int, piece: m.History) -> None:
        """Take a piece of the history of a chunk.

        Raises:
            RemoteProtocolError: it was not asked for, or is not the next one.
        """
        self._check_place(shard, piece.table, piece.chunk)
        asked = self._asked[piece.table]
        expecting = next((each for each in asked if not each.has(piece.chunk)), None)
        if expecting is None:
            raise RemoteProtocolError(
                f"shard {shard} sent a history of table {piece.table} that nobody has asked for"
            )
        expecting.put(piece)
        while asked and asked[0].arrays is not None:
            asked.popleft()

    def _fitting(self, shard: int, value: m.Value) -> ChunkCopy:
        self._check_place(shard, value.table, value.chunk)
        if not self.copies[value.table]:
            raise RemoteProtocolError(
                f"shard {shard} sent a value of table {value.table}, which belongs to a different "
                "plane"
            )
        copy = self.copies[value.table][value.chunk]
        coder, size = self._coders[value.table], copy.chunk.size
        rows = self._rows_of(copy.chunk)
        whole = kind = NUMPY_TYPES[self._store.tables[value.table].held_as]
        if value.array.dtype != kind and coder is not None:
            size, kind = coder.size(size), ENCODED
        elif value.array.dtype != kind and rows is not None:
            size, kind = value.array.size, ENCODED
        elif value.array.dtype != kind:
            kind = NUMPY_TYPES[of_values(self._store, self._store.tables[value.table])]
        if not value.array.size and self._store.tables[value.table].may_skip and copy.clock >= 0:
            size = 0
        if value.array.size != size or not copy.includes(value.own):
            raise RemoteProtocolError(
                f"shard {shard} sent a value that does not fit chunk {value.chunk}"
            )
        if value.array.dtype != whole:
            if value.array.dtype != kind or copy.clock < 0 or value.clock > copy.clock + 1:
                raise RemoteProtocolError(
                    f"shard {shard} sent a change that does not fit chunk {value.chunk}"
                )
            if coder is not None:
                coder.check(value.array.view(np.uint8), copy.chunk.size)
            elif rows is not None:
                rows.check(value.array.view(np.uint8))
        return copy

    def _rows_of(self, chunk: Chunk) -> ChunkRows | None:
        spec = self._store.tables[chunk.table]
        return ChunkRows.of(chunk, spec.row_elements) if self._store.packs_rows(spec) else None

    def _check_place(self, shard: int, table: int, chunk: int) -> None:
        row = self.chunks[table] if table < len(self.chunks) else ()
        if chunk >= len(row) or row[chunk].shard != shard:
            raise RemoteProtocolError(
                f"shard {shard} sent chunk {chunk} of table {table}, which it does not have"
            )

    def missing(self, table: int, needed: int, *, first: int = 0) -> Chunk | None:
        """Return the first chunk of a table that has not reached clock `needed`, or None.

        Args:
            table: index of the table.
            needed: the clock.
            first: the chunk to begin with; those before it are fresh enough.
        """
        for copy in islice(self.copies[table], first, None):
            clock = copy.clock
            if self._store.tables[table].adds_changes and clock >= 0:
                clock = max(clock, self._fresh[copy.chunk.shard])
            if clock < needed:
                return copy.chunk
        return None

    def take(self, table: int) -> list[Piece]:
        """Return what has come since the last call; the reader writes it over its copy of the
        table.
        """
        pieces = []
        for copy in self.copies[table]:
            if copy.unread is not None:
                changes = self._own_changes(copy) if self._store.tables[table].adds_changes else ()
                pieces.append(Piece(copy.chunk.start, copy.chunk.stop, copy.unread, changes))
                copy.unread = None
        return pieces

    def _own_changes(self, copy: ChunkCopy) -> tuple[m.Payload, ...]:
        """Return the changes of this worker that the last value does not include."""
        held = None if self._log is None else self._log.peek((copy.chunk.table, copy.chunk.index))
        sent = tuple(push.array for push in copy.held)
        return sent if held is None else (*sent, held)
