"""Row tables of a process that trains alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from poseidon.exchange.alone import AloneRowTables
from ps_server import RowTableSpec
from ps_server.protocol.messages import Array, RowIds


def test_each_piece_is_restored_before_the_next_one_is_read() -> None:
    tables = AloneRowTables()
    table = tables.create(RowTableSpec(name="words", rows=9, dim=2))

    def pieces() -> Iterator[tuple[RowIds, Sequence[Array]]]:
        for row in range(3):
            assert sum(len(rows) for rows, _ in tables.stored(table)) == row
            yield np.array([row], np.uint32), [np.full((1, 2), row, np.float32)]

    tables.restore(table, 7, pieces())
    assert tables.clock(table) == 7
    assert tables.read(tables.request(table, np.array([2], np.uint32))).tolist() == [[2.0, 2.0]]
