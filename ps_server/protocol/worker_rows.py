"""The row tables of one worker: pushes and requests are cut by shard, and answers put together.

A state machine without I/O.

Laws:

* A table's clock counts this worker's pushes to it. A request for its present iteration needs what
  follows from all workers' first `clock - s` pushes (`clock.py`).
* A request goes to every shard, also where it names none of its rows: so a worker is never more
  than s + 1 pushes ahead of another on any shard, and has received the signals of rank 0 in time
  (`Session.signal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.clock import needed_clock
from ps_server.protocol.row_settings import MAX_ROW_TABLES, RowTableSpec

Cut = list[NDArray[np.intp]]
"""For each shard the places of its rows in an array of rows."""
Sent = list[m.Addressed]


@dataclass(slots=True)
class _Request:
    row_table: int
    cut: Cut
    values_Nd: m.Array
    missing: set[int]
    forgotten: bool = False


@dataclass(slots=True)
class _Table:
    spec: RowTableSpec
    clock: int = 0
    requested: int = -1
    """The largest number of own pushes at a request that was made for its own iteration."""
    kept: dict[int, m.KeptRows] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)


class WorkerRows:
    """See the module's docstring.

    Args:
        shards: number of shards.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._tables: list[_Table] = []
        self._requests: dict[int, _Request] = {}
        self._number = 0

    @property
    def specs(self) -> list[RowTableSpec]:
        """The descriptions of the tables."""
        return [table.spec for table in self._tables]

    def clock(self, table: int) -> int:
        """Return the number of this worker's pushes to a table."""
        return self._tables[table].clock

    def create(self, spec: RowTableSpec) -> tuple[int, Sent]:
        """Create the next table; all workers create the same ones in the same order. Return its
        number.
        """
        if len(self._tables) >= MAX_ROW_TABLES:
            raise LocalProtocolError(
                f"there are {MAX_ROW_TABLES} row tables, the most there can be"
            )
        table = len(self._tables)
        self._tables.append(_Table(spec))
        create = m.CreateRows(table, self.shards, spec)
        return table, [m.Addressed(shard, create) for shard in range(self.shards)]

    def push(self, table: int, rows_N: m.RowIds, gradient_Nd: m.Array, rate: float) -> Sent:
        """End an iteration of a table: push the gradients of its rows.

        A request for this iteration has been made before.
        """
        own = self._tables[table]
        self._check(own.spec, rows_N, [gradient_Nd], [own.spec.dim])
        if own.requested < own.clock:
            raise LocalProtocolError(
                f"table '{own.spec.name}' is pushed in iteration {own.clock} before its rows were "
                "requested"
            )
        sent = [
            m.Addressed(
                shard, m.PushRows(table, own.clock, rate, rows_N[at], gradient_Nd[at].reshape(-1))
            )
            for shard, at in enumerate(self._cut(rows_N))
        ]
        own.clock += 1
        return sent

    def request(
        self, table: int, rows_N: m.RowIds, *, ahead: int = 0, staleness: int | None = None
    ) -> tuple[int, Sent]:
        """Request rows.

        Args:
            table: the table.
            rows_N: the rows.
            ahead: 0: for this worker's present iteration; 1: for the one after the next push.
            staleness: a bound to use in place of the table's own.

        Returns:
            The number of the request, for `take`.
        """
        own = self._tables[table]
        self._check(own.spec, rows_N, [], [])
        number, self._number = self._number, self._number + 1
        clock = own.clock + ahead
        bound = own.spec.staleness if staleness is None else staleness
        needed = max(0, needed_clock(clock, bound))
        own.requested = max(own.requested, clock)
        cut = self._cut(rows_N)
        self._requests[number] = _Request(
            table,
            cut,
            np.empty((len(rows_N), own.spec.dim), np.float32),
            set(range(self.shards)),
        )
        return number, [
            m.Addressed(shard, m.GetRows(table, number, needed, rows_N[at]))
            for shard, at in enumerate(cut)
        ]

    def take(self, number: int) -> m.Array | None:
        """Return the values of a request, once; None while parts are missing."""
        if self._requests[number].missing:
            return None
        return self._requests.pop(number).values_Nd

    def forget(self, number: int) -> None:
        """Drop a request whose values nobody will take."""
        request = self._requests[number]
        request.forgotten = True
        if not request.missing:
            del self._requests[number]

    def read(self, table: int, shard: int, first: int, count: int) -> Sent:
        """Ask a shard for changed rows; see `ReadRows`. One question a table and shard at a time."""
        self._tables[table].asked.add(shard)
        return [m.Addressed(shard, m.ReadRows(table, first, count))]

    def take_kept(self, table: int, shard: int) -> m.KeptRows | None:
        """Return the answer of a shard to `read`, once; None before it has come."""
        return self._tables[table].kept.pop(shard, None)

    def restore(self, table: int, clock: int, rows_N: m.RowIds, arrays: Sequence[m.Array]) -> Sent:
        """Let the shards continue with these rows at a clock, before the first push. Rank 0 only;
        `restart` sets the clock of each worker.

        Args:
            table: the table.
            clock: number of updates that the rows have.
            rows_N: the rows.
            arrays: N rows of values and of each history.
        """
        spec = self._tables[table].spec
        self._check(spec, rows_N, arrays, spec.widths)
        return [
            m.Addressed(
                shard, m.KeptRows(table, clock, rows_N[at], [a[at].reshape(-1) for a in arrays])
            )
            for shard, at in enumerate(self._cut(rows_N))
        ]

    def restart(self, table: int, clock: int) -> None:
        """Count this worker's pushes from a clock on."""
        self._tables[table].clock = clock
        self._tables[table].requested = -1

    def receive_rows(self, shard: int, rows: m.Rows) -> None:
        """Take a shard's part of a request.

        Raises:
            RemoteProtocolError: it is not one that the shard may give now.
        """
        request = self._requests.get(rows.number)
        if request is None or rows.row_table != request.row_table or shard not in request.missing:
            raise RemoteProtocolError(f"shard {shard} sent rows that were not requested")
        at = request.cut[shard]
        dim = request.values_Nd.shape[1]
        if rows.array.size != len(at) * dim:
            raise RemoteProtocolError(
                f"shard {shard} sent {rows.array.size} elements for {len(at)} rows of {dim}"
            )
        request.values_Nd[at] = rows.array.reshape(len(at), dim)
        request.missing.discard(shard)
        if request.forgotten and not request.missing:
            del self._requests[rows.number]

    def receive_kept(self, shard: int, kept: m.KeptRows) -> None:
        """Take a shard's answer to `read`; raises as `receive_rows`."""
        own = self._tables[kept.row_table] if kept.row_table < len(self._tables) else None
        if own is None or shard not in own.asked:
            raise RemoteProtocolError(f"shard {shard} sent rows that were not asked for")
        if [a.size for a in kept.arrays] != [
            len(kept.rows) * width for width in own.spec.widths
        ] or (len(kept.rows) and kept.rows[-1] >= own.spec.rows):
            raise RemoteProtocolError(
                f"shard {shard} sent rows that do not fit table '{own.spec.name}'"
            )
        own.asked.discard(shard)
        own.kept[shard] = kept

    def _cut(self, rows_N: m.RowIds) -> Cut:
        if self.shards == 1:
            return [np.arange(len(rows_N))]
        homes = rows_N % np.uint32(self.shards)
        return [np.flatnonzero(homes == shard) for shard in range(self.shards)]

    @staticmethod
    def _check(
        spec: RowTableSpec, rows_N: m.RowIds, arrays: Sequence[m.Array], widths: Sequence[int]
    ) -> None:
        """Check rows and arrays of this worker's program.

        Raises:
            LocalProtocolError: a type, a shape or a row is wrong.
        """
        if rows_N.dtype != np.uint32 or rows_N.ndim != 1 or np.any(rows_N[1:] <= rows_N[:-1]):
            raise LocalProtocolError(
                f"table '{spec.name}' takes rows as flat uint32 in increasing order"
            )
        if len(rows_N) and rows_N[-1] >= spec.rows:
            raise LocalProtocolError(
                f"table '{spec.name}' has no row {rows_N[-1]}; expected 0 to {spec.rows - 1}"
            )
        shapes = [(len(rows_N), width) for width in widths]
        if [a.shape for a in arrays] != shapes or any(a.dtype != np.float32 for a in arrays):
            raise LocalProtocolError(
                f"table '{spec.name}' takes float32 of shapes {shapes}, not "
                f"{[(a.dtype.name, a.shape) for a in arrays]}"
            )
