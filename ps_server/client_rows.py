"""A worker's row tables: blocking reads, pushes that return at once.

All methods are safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ps_server.monitor import Monitor
from ps_server.protocol.messages import Addressed, Array, RowIds
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.protocol.worker_rows import WorkerRows
from ps_server.row_rules import NO_ROWS

T = TypeVar("T")
PIECE_ROWS = 2**16
"""Rows of a message when all rows of a table are read or set."""


class Call(Protocol):
    """Calls a function under the client's monitor, and queues the messages that it returns."""

    def __call__(self, call: Callable[[], tuple[T, list[Addressed]]], /) -> T: ...


class ClientRows:
    """The row tables of a `Client`. All workers create the same ones, in the same order.

    One iteration of a table: `request` the rows, `read` them, and `push` the gradients of some of
    them, maybe of none. A request may be made one iteration ahead.

    Args:
        call: see `Call`.
        monitor: of the client.
        rows: returns the tables of the client's present session.
    """

    def __init__(self, call: Call, monitor: Monitor, rows: Callable[[], WorkerRows]) -> None:
        self._call = call
        self._monitor = monitor
        self._rows = rows

    def create(self, spec: RowTableSpec) -> int:
        """Create a row table. Return its number."""
        return self._sending(lambda rows: rows.create(spec))

    def clock(self, table: int) -> int:
        """Return the number of this worker's pushes to a table."""
        with self._monitor:
            return self._rows().clock(table)

    def request(
        self, table: int, rows_N: RowIds, *, ahead: int = 0, staleness: int | None = None
    ) -> int:
        """Request rows; return at once, with the number of the request.

        Args:
            table: the table.
            rows_N: uint32, in increasing order.
            ahead: 0: for this worker's present iteration; 1: for the one after its next push.
            staleness: a bound to use in place of the table's own.
        """
        return self._sending(
            lambda rows: rows.request(table, rows_N, ahead=ahead, staleness=staleness)
        )

    def read(self, number: int) -> Array:
        """Wait for the values of a request, N x dim, and return them, once.

        Raises:
            StalenessTimeout: they did not come in time.
        """
        return self._monitor.wait_for(
            lambda: self._rows().take(number), f"the rows of request {number} did not arrive"
        )

    def forget(self, number: int) -> None:
        """Drop a request that is not read."""
        with self._monitor:
            self._rows().forget(number)

    def push(self, table: int, rows_N: RowIds, gradient_Nd: Array, *, rate: float) -> None:
        """End this worker's iteration of a table; return at once.

        Args:
            table: the table.
            rows_N: uint32, in increasing order; may be empty.
            gradient_Nd: the sum of this worker's gradients of each row, float32. It must not be
                written to any more.
            rate: of this iteration, the same on every worker.
        """
        self._sending(lambda rows: (None, rows.push(table, rows_N, gradient_Nd, rate)))

    def stored(self, table: int) -> Iterator[tuple[RowIds, list[Array]]]:
        """Yield all rows that have been changed, in pieces: rows, and values with histories.

        The rows have the updates of all workers' finished iterations of this worker. No worker
        pushes meanwhile.
        """
        self._settle(table)
        for shard in range(self._shards()):
            first = 0
            while True:
                rows_N, arrays = self._read_stored(table, shard, first)
                if not len(rows_N):
                    break
                yield rows_N, arrays
                first += len(rows_N)

    def _read_stored(self, table: int, shard: int, first: int) -> tuple[RowIds, list[Array]]:
        self._sending(lambda rows: (None, rows.read(table, shard, first, PIECE_ROWS)))
        kept = self._monitor.wait_for(
            lambda: self._rows().take_kept(table, shard),
            f"the rows of table {table} did not arrive from shard {shard}",
        )
        shaped = zip(kept.arrays, self._spec(table).widths, strict=True)
        return kept.rows, [array.reshape(len(kept.rows), width) for array, width in shaped]

    def restore(
        self, table: int, clock: int, pieces: Iterable[tuple[RowIds, Sequence[Array]]] | None
    ) -> None:
        """Let a table continue at a clock, before its first push.

        All workers call it, and then take part in a collection.

        Args:
            table: the table.
            clock: number of updates that its rows have.
            pieces: on rank 0: rows, and values with histories, some thousand rows each. None on
                other workers.
        """
        with self._monitor:
            self._rows().restart(table, clock)
        if pieces is None:
            return
        empty = [np.zeros((0, width), np.float32) for width in self._spec(table).widths]
        self._restore(table, clock, NO_ROWS, empty)  # every shard gets the clock
        for rows_N, arrays in pieces:
            self._restore(table, clock, rows_N, arrays)

    def _restore(self, table: int, clock: int, rows_N: RowIds, arrays: Sequence[Array]) -> None:
        self._sending(lambda rows: (None, rows.restore(table, clock, rows_N, arrays)))
        self._settle(table)  # no more than one piece waits to be sent

    def _settle(self, table: int) -> None:
        """Wait until every shard has all updates of this worker's finished iterations."""
        self.read(self.request(table, NO_ROWS, staleness=0))

    def _shards(self) -> int:
        with self._monitor:
            return self._rows().shards

    def _spec(self, table: int) -> RowTableSpec:
        with self._monitor:
            return self._rows().specs[table]

    def _sending(self, call: Callable[[WorkerRows], tuple[T, list[Addressed]]]) -> T:
        return self._call(lambda: call(self._rows()))
