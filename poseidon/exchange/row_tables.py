"""Row tables of one worker: a job's, and those of a process that trains alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from ps_server.client_rows import PIECE_ROWS, ClientRows
from ps_server.protocol import messages as m
from ps_server.protocol.messages import Array, RowIds
from ps_server.protocol.row_cell import RowCell
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.row_rules import NO_ROWS

Pieces = Iterable[tuple[RowIds, Sequence[Array]]]


class AloneRowTables:
    """The row tables of a process that trains alone; `ClientRows` says what each method does."""

    def __init__(self) -> None:
        self._cells: list[RowCell] = []
        self._requests: dict[int, tuple[int, RowIds]] = {}
        self._number = 0

    def create(self, spec: RowTableSpec) -> int:
        self._cells.append(RowCell(m.CreateRows(len(self._cells), 1, spec), shard=0, workers=1))
        return len(self._cells) - 1

    def clock(self, table: int) -> int:
        return self._cells[table].clock

    def request(
        self, table: int, rows_N: RowIds, *, ahead: int = 0, staleness: int | None = None
    ) -> int:
        self._number += 1
        self._requests[self._number] = table, rows_N
        return self._number

    def read(self, number: int) -> Array:
        table, rows_N = self._requests.pop(number)
        return self._cells[table].memory.values(rows_N)

    def forget(self, number: int) -> None:
        del self._requests[number]

    def push(self, table: int, rows_N: RowIds, gradient_Nd: Array, *, rate: float) -> None:
        cell = self._cells[table]
        cell.push(0, m.PushRows(table, cell.clock, rate, rows_N, gradient_Nd.reshape(-1)))

    def stored(self, table: int) -> Iterator[tuple[RowIds, list[Array]]]:
        memory = self._cells[table].memory
        first = 0
        while first < memory.count:
            rows_N, arrays = memory.stored(first, PIECE_ROWS)
            yield rows_N, arrays
            first += len(rows_N)

    def restore(self, table: int, clock: int, pieces: Pieces | None) -> None:
        cell = self._cells[table]
        empty = [np.zeros((0, width), np.float32) for width in cell.spec.widths]
        for rows_N, arrays in chain(pieces or (), [(NO_ROWS, empty)]):
            flat = [array.reshape(-1) for array in arrays]
            cell.restore(0, m.KeptRows(table, clock, rows_N, flat))


RowTables = ClientRows | AloneRowTables
