"""What a worker sends in place of its gradients and changes, and which of them have left.

Law: under `SSPAggr` with a budget, changes may be held back and sent as a sum (`bandwidth.py`). At
clock c all changes of iterations < c + 1 - s have been sent, so no worker with as many finished
iterations as this one waits for them. A `Clock` message has the number of iterations whose changes
have all been sent, so the bound holds whatever is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ps_server.errors import LocalProtocolError
from ps_server.protocol import messages as m
from ps_server.protocol.bandwidth import ChangeLog, Key
from ps_server.protocol.packed_rows import ChunkRows
from ps_server.protocol.placement import Chunk
from ps_server.protocol.precision import Compressor, Feedback, of_pushes
from ps_server.protocol.settings import Precision, StoreSpec, TableSpec
from ps_server.protocol.values import Held, WorkerValues, check_array

Parts = tuple[m.Payload, ...]
"""What is pushed to each chunk of a table."""


class PushEncoder:
    """Makes of a table's gradients and changes what travels, chunk by chunk.

    Args:
        store: the store.
        host: of the worker.
        chunks: of each table.
        own: the tables of the worker's plane.

    Attributes:
        nodes: pushes of each table in an iteration.
    """

    def __init__(
        self,
        store: StoreSpec,
        host: int,
        chunks: Sequence[Sequence[Chunk]],
        own: Sequence[int],
    ) -> None:
        self._store = store
        self._own = store.placed.of(host)
        self._chunks = chunks
        self._feedback = [
            _feedback_of(store, spec, row, host) if table in own else []
            for table, (row, spec) in enumerate(zip(chunks, store.tables, strict=True))
        ]
        self._encoded = [0] * len(store.tables)  # pushes so far that were encoded or rounded
        self.nodes = [len(store.nodes(table, host)) for table in store.tables]

    def held_back(self, table: int) -> Mapping[int, m.Array]:
        """See `Session.held_back`."""
        parts = zip(self._own, self._feedback[table], strict=False)
        return {v: part.held_back for v, part in parts if isinstance(part, Compressor)}

    def encode(self, table: int, array: m.Payload, clock: int) -> m.Payload | Parts:
        """Return what to push in place of an array in an iteration: the array, or it rounded,
        encoded, or in chunks without rows of zeros.
        """
        spec = self._store.tables[table]
        check_array(spec, array, spec.held_as)
        if spec.held_as is not Precision.FLOAT32:
            return array
        exact = np.asarray(array, np.float32)
        if self._store.packs_rows(spec):
            return tuple(
                _without_zeros(exact[chunk.start : chunk.stop], chunk, spec.row_elements)
                for chunk in self._chunks[table]
            )
        if not self._feedback[table]:
            return exact
        feedback = self._feedback[table][self._encoded[table] % self.nodes[table]]
        self._encoded[table] += 1
        if isinstance(feedback, Compressor):
            return feedback.encode(exact, clock)
        return feedback.round(exact)

    def cut(self, table: int, array: m.Payload) -> Parts:
        """Return the chunks of what `encode` has returned as one array.

        Raises:
            LocalProtocolError: its type or its size is wrong.
        """
        spec, feedback = self._store.tables[table], next(iter(self._feedback[table]), None)
        if not array.size and spec.may_skip:
            return tuple(array for _ in self._chunks[table])
        if isinstance(feedback, Compressor):
            bounds = feedback.bounds
            if array.shape != (bounds[-1],) or array.dtype != np.uint8:
                raise LocalProtocolError(
                    f"table '{spec.name}' takes {bounds[-1]} flat encoded bytes, "
                    f"not {array.dtype} of shape {array.shape}"
                )
            return tuple(array[start:stop] for start, stop in pairwise(bounds))
        check_array(spec, array, of_pushes(self._store, spec))
        return tuple(array[c.start : c.stop] for c in self._chunks[table])


class SentChanges:
    """Which changes of a worker have left, at staleness > 0, and what the shards know of it.

    Args:
        log: holds changes back; None: each leaves at once.
    """

    def __init__(self, store: StoreSpec, values: WorkerValues, log: ChangeLog | None) -> None:
        self.log = log
        self._tables = store.tables
        self._copies = values.copies
        self._adding = [
            copy
            for row, spec in zip(values.copies, store.tables, strict=True)
            for copy in row
            if spec.adds_changes
        ]
        self._shards = sorted({copy.chunk.shard for copy in self._adding})
        self._told = store.start_clock

    def release(self, now_s: float, clock: int) -> list[m.Addressed]:
        """Send the changes that are held back, as far as the budget allows."""
        if self.log is None:
            return []
        outgoing = [self._send(key, self.log) for key in self.log.affordable(now_s)]
        return [*outgoing, *self.tell(clock)] if outgoing else []

    def send_due(self, before: Callable[[TableSpec], int], clock: int) -> list[m.Addressed]:
        """Send what is held back of iterations before `before(table)`, and the clock that this
        reaches.
        """
        if self.log is None:
            return []
        due = [
            key
            for table, spec in enumerate(self._tables)
            for key in self.log.due(table, before(spec))
        ]
        return [*(self._send(key, self.log) for key in due), *self.tell(clock)]

    def tell(self, clock: int) -> list[m.Addressed]:
        """Send the shards the number of iterations whose changes have all been sent, of those
        before `clock`.
        """
        reached = min([clock, *(copy.sent for copy in self._adding)])
        clocks = range(self._told + 1, reached + 1)
        self._told = max(self._told, reached)
        return [m.Addressed(shard, m.Clock(each)) for each in clocks for shard in self._shards]

    def _send(self, key: Key, log: ChangeLog) -> m.Addressed:
        taken = log.take(key)
        first, count, array = taken.first, taken.iterations, taken.array
        copy = self._copies[key[0]][key[1]]
        copy.held.append(Held(array, count))
        copy.sent = first + count
        return m.Addressed(copy.chunk.shard, m.Push(*key, first, 0.0, array, count))


def _feedback_of(
    store: StoreSpec, table: TableSpec, chunks: Sequence[Chunk], host: int
) -> list[Feedback | Compressor]:
    """Return what rounds or encodes a table's pushes, one for each virtual worker of a host;
    none where they are sent as they are.
    """
    if not store.is_lossy(table):
        return []
    nodes = store.nodes(table, host)
    if table.gradient_codec is not None:
        return [Compressor(chunks, table.gradient_codec) for _ in nodes]
    precision = of_pushes(store, table)
    if precision is Precision.FLOAT32:
        return []
    return [Feedback(table.size, precision, reuse=table.staleness == 0) for _ in nodes]


def _without_zeros(part: m.Array, chunk: Chunk, row: int) -> m.Payload:
    packed = ChunkRows.of(chunk, row).pack_nonzero(part)
    return part if packed is None else packed
