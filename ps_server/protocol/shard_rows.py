"""The row tables of a shard. A state machine without I/O: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.row_cell import RowCell

Answer = tuple[int, m.ToWorker]
"""A rank, and the message for it."""


class ShardRows:
    """See the module's docstring.

    Args:
        shard: this shard's number.
        workers: number of workers.
    """

    def __init__(self, shard: int, workers: int) -> None:
        self._shard = shard
        self._workers = workers
        self._cells: dict[int, RowCell] = {}
        self.handlers: dict[type, Callable[[int, Any], Iterator[Answer]]] = {
            m.CreateRows: self._create,
            m.PushRows: self._push,
            m.GetRows: self._get,
            m.ReadRows: self._read,
            m.KeptRows: self._restore,
        }
        """What takes each kind of message, from a rank."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all row tables. Any thread may read it."""
        return sum(cell.memory.bytes for cell in list(self._cells.values()))

    def behind(self, rank: int, other: int) -> bool:
        """Return whether a worker has made fewer pushes to a table than a different worker."""
        return any(cell.own[rank] < cell.own[other] for cell in self._cells.values())

    def _create(self, rank: int, create: m.CreateRows) -> Iterator[Answer]:
        cell = self._cells.get(create.row_table)
        if self._shard >= create.shards or create.row_table > len(self._cells):
            raise RemoteProtocolError(
                f"worker {rank} creates row table {create.row_table} of {create.shards} shards on "
                f"shard {self._shard}, which has {len(self._cells)} row tables"
            )
        if cell is None:
            try:
                cell = RowCell(create, self._shard, self._workers)
            except MemoryError:
                raise RemoteProtocolError(
                    f"shard {self._shard} has no memory for the row table {create.spec}"
                ) from None
            self._cells[create.row_table] = cell
        elif cell.create != create:
            raise RemoteProtocolError(
                f"worker {rank} describes row table {create.row_table} as {create.spec}; the first "
                f"worker as {cell.spec}"
            )
        if rank == 0:
            cell.is_open = True
            yield from cell.answers()

    def _push(self, rank: int, push: m.PushRows) -> Iterator[Answer]:
        cell = self._cell(push.row_table)
        if cell.push(rank, push):
            yield from cell.answers()

    def _get(self, rank: int, get: m.GetRows) -> Iterator[Answer]:
        cell = self._cell(get.row_table)
        cell.get(rank, get)
        yield from cell.answers()

    def _read(self, rank: int, read: m.ReadRows) -> Iterator[Answer]:
        yield rank, self._cell(read.row_table).stored(read)

    def _restore(self, rank: int, kept: m.KeptRows) -> Iterator[Answer]:
        self._cell(kept.row_table).restore(rank, kept)
        yield from ()

    def _cell(self, row_table: int) -> RowCell:
        cell = self._cells.get(row_table)
        if cell is None:
            raise RemoteProtocolError(f"there is no row table {row_table}")
        return cell
