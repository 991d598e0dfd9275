"""A shard's part of a row table: rows with their histories, and the gradients on their way; and the
row tables of a shard. State machines without I/O: messages in, messages out.

Laws:

* An iteration takes one push from every worker. When all have come, the shard adds the gradients of
  each row in worker order, divides by the number of workers, and applies the rule once to the rows
  that have a gradient. Bits depend neither on the order of arrival nor on the number of shards.
* A row has memory from its first gradient on. Before it has its first value, which follows from the
  row's number. A row without a gradient keeps its bits.
* An illegal message changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps_server.errors import RemoteProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.row_settings import RowTableSpec
from ps_server.row_rules import first_values, sum_by_row, update_rows

Places = NDArray[np.int64]
"""Indices of rows in the memory of a shard."""
MAX_WAITING = 64
"""Requests of a worker that may wait at a time."""
PIECE_BYTES = 2**24
"""Most bytes of rows and histories in one `KeptRows`, save of a single row."""
_LEAST_ROWS = 1024
_GROWTH = 1.25


class RowMemory:
    """The rows of one shard that have been changed, in the order of their first changes.

    Args:
        spec: of the table.
        shard: this shard's number.
        shards: number of shards.
    """

    def __init__(self, spec: RowTableSpec, shard: int, shards: int) -> None:
        self._spec = spec
        self._shard = shard
        self._shards = shards
        self._place = np.zeros(spec.rows_on(shard, shards), np.uint32)  # place + 1; 0: none
        self._rows = np.zeros(0, np.uint32)
        self._arrays = [np.zeros((0, width), np.float32) for width in spec.widths]
        self.count = 0
        """The number of rows that have memory."""

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sum(a.nbytes for a in (self._place, self._rows, *self._arrays))

    def values(self, rows_N: m.RowIds) -> m.Array:
        """Return a copy of the values of rows, N x dim."""
        places = self._places(rows_N)
        spec, known = self._spec, places > 0
        values = np.empty((len(rows_N), spec.dim), np.float32)
        values[known] = self._arrays[0][places[known] - 1]
        new = rows_N[~known]
        values[~known] = first_values(spec.init, spec.scale, spec.seed, new, spec.dim)
        return values

    def take(self, rows_N: m.RowIds) -> tuple[Places, list[m.Array]]:
        """Return the places of rows, and copies of their values and histories.

        Those that have no memory get it.
        """
        places = self._places(rows_N)
        new = rows_N[places == 0]
        if len(new):
            spec = self._spec
            self._grow(self.count + len(new))
            fresh = np.arange(self.count, self.count + len(new))
            self._rows[fresh] = new
            self._arrays[0][fresh] = first_values(spec.init, spec.scale, spec.seed, new, spec.dim)
            self._place[new // np.uint32(self._shards)] = fresh + 1
            self.count += len(new)
            places = self._places(rows_N)
        places = places - 1
        return places, [array[places] for array in self._arrays]

    def put(self, places: Places, arrays: Sequence[m.Array]) -> None:
        """Set the values and histories at places."""
        for array, given in zip(self._arrays, arrays, strict=True):
            array[places] = given

    def stored(self, first: int, count: int) -> tuple[m.RowIds, list[m.Array]]:
        """Return the rows of some places, in increasing order, with values and histories."""
        count = min(count, max(1, PIECE_BYTES // (4 * sum(self._spec.widths))))
        places = np.arange(first, max(first, min(first + count, self.count)))
        places = places[np.argsort(self._rows[places])]
        return self._rows[places], [array[places] for array in self._arrays]

    def _places(self, rows_N: m.RowIds) -> Places:
        places: Places = self._place[rows_N // np.uint32(self._shards)].astype(np.int64)
        return places

    def _grow(self, count: int) -> None:
        if count <= len(self._rows):
            return
        size = max(count, _LEAST_ROWS, int(_GROWTH * len(self._rows)))
        size = min(size, len(self._place))
        self._rows.resize(size, refcheck=False)
        for array, width in zip(self._arrays, self._spec.widths, strict=True):
            array.resize((size, width), refcheck=False)


class RowCell:
    """A shard's part of a row table.

    Args:
        create: describes the table.
        shard: this shard's number.
        workers: number of workers.
    """

    def __init__(self, create: m.CreateRows, shard: int, workers: int) -> None:
        self.create = create
        self.spec = create.spec
        self.memory = RowMemory(create.spec, shard, create.shards)
        self.clock = 0
        self.is_open = False
        """Whether worker 0 has created it: until then no request is answered, since a signal that
        worker 0 has sent before counts without this table's staleness (`Session.signal`)."""
        self.own = [0] * workers
        """Pushes of each worker, including the pushes up to the start clock."""
        self._shard = shard
        self._arrived: dict[int, dict[int, m.PushRows]] = {}
        self._waiting: list[tuple[int, m.GetRows]] = []

    @property
    def name(self) -> str:
        """The table's name, for messages."""
        return f"row table '{self.spec.name}'"

    def push(self, rank: int, push: m.PushRows) -> bool:
        """Take a worker's gradients of an iteration. Return whether the clock has moved.

        Raises:
            RemoteProtocolError: they are not legal now.
        """
        self._check_rows(rank, push.rows)
        self._check_arrays(rank, push.rows, [push.array], [self.spec.dim])
        if push.clock != self.own[rank] or push.clock > self.clock + self.spec.staleness:
            raise RemoteProtocolError(
                f"worker {rank} pushes iteration {push.clock} of {self.name}, which is at "
                f"{self.clock}; expected {self.own[rank]}"
            )
        others = self._arrived.get(push.clock, {})
        rate = next((other.rate for other in others.values()), push.rate)
        if push.rate != rate:
            raise RemoteProtocolError(
                f"worker {rank} has rate {push.rate} in iteration {push.clock} of {self.name}; the "
                f"others have {rate}"
            )
        self._arrived.setdefault(push.clock, {})[rank] = push
        self.own[rank] += 1
        before = self.clock
        while len(self._arrived.get(self.clock, ())) == len(self.own):
            self._apply(self._arrived.pop(self.clock))
        return self.clock > before

    def _apply(self, pushes: dict[int, m.PushRows]) -> None:
        in_order = [pushes[rank] for rank in range(len(self.own))]
        dim = self.spec.dim
        rows_N, sum_Nd = sum_by_row([(p.rows, p.array.reshape(-1, dim)) for p in in_order], dim)
        if len(rows_N):
            sum_Nd /= np.float32(len(self.own))
            places, (value_Nd, *history) = self.memory.take(rows_N)
            update_rows(
                self.spec.rule, sum_Nd, history, value_Nd, rate=pushes[0].rate, step=self.clock
            )
            self.memory.put(places, [value_Nd, *history])
        self.clock += 1

    def get(self, rank: int, get: m.GetRows) -> None:
        """Let a request wait.

        Raises:
            RemoteProtocolError: it is not legal, or too many of the worker wait.
        """
        self._check_rows(rank, get.rows)
        if sum(waiting == rank for waiting, _ in self._waiting) >= MAX_WAITING:
            raise RemoteProtocolError(
                f"worker {rank} already waits for {MAX_WAITING} requests of {self.name}"
            )
        self._waiting.append((rank, get))

    def answers(self) -> Iterator[tuple[int, m.Rows]]:
        """Yield the answers to the requests whose clock the table has reached, by rank; none before
        it is open.
        """
        waiting, self._waiting = self._waiting, []
        for rank, get in waiting:
            if get.clock > self.clock or not self.is_open:
                self._waiting.append((rank, get))
            else:
                values = self.memory.values(get.rows).reshape(-1)
                yield rank, m.Rows(get.row_table, get.number, values)

    def stored(self, read: m.ReadRows) -> m.KeptRows:
        """Return changed rows with values and histories."""
        rows_N, arrays = self.memory.stored(read.first, read.count)
        return m.KeptRows(read.row_table, self.clock, rows_N, [a.reshape(-1) for a in arrays])

    def restore(self, rank: int, kept: m.KeptRows) -> None:
        """Continue with these rows, at their clock.

        Raises:
            RemoteProtocolError: they are not legal now.
        """
        self._check_rows(rank, kept.rows)
        self._check_arrays(rank, kept.rows, kept.arrays, self.spec.widths)
        if rank != 0 or any(own != self.clock for own in self.own):
            raise RemoteProtocolError(
                f"worker {rank} sets rows of {self.name}; only worker 0 may, before the first push"
            )
        self.clock = kept.clock
        self.own = [kept.clock] * len(self.own)
        places, _ = self.memory.take(kept.rows)
        shapes = [(len(kept.rows), width) for width in self.spec.widths]
        arrays = [a.reshape(shape) for a, shape in zip(kept.arrays, shapes, strict=True)]
        self.memory.put(places, arrays)

    def _check_rows(self, rank: int, rows_N: m.RowIds) -> None:
        if len(rows_N) and (
            rows_N[-1] >= self.spec.rows
            or np.any(rows_N % np.uint32(self.create.shards) != self._shard)
        ):
            raise RemoteProtocolError(
                f"worker {rank} names rows of {self.name} that shard {self._shard} does not have"
            )

    def _check_arrays(
        self, rank: int, rows_N: m.RowIds, arrays: Sequence[m.Array], widths: Sequence[int]
    ) -> None:
        sizes = [array.size for array in arrays]
        if sizes != [len(rows_N) * width for width in widths]:
            raise RemoteProtocolError(
                f"worker {rank} sends {sizes} elements for {len(rows_N)} rows of {self.name}; "
                f"expected {list(widths)} a row"
            )


Answer = tuple[int, m.ToWorker]
"""A rank, and the message for it."""


class ShardRows:
    """The row tables of a shard.

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
