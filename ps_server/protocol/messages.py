"""The messages between a worker's session and a shard: frozen values, no behaviour.

A worker sends them in this order:

    Hello -> Create [-> Initial, on host 0 only] -> { Push, Clock, Get, ... } -> Leave

and a shard answers `Welcome`, then `Value`s as the consistency model says. An illegal message is
answered with `Fault` and changes no state. Arrays are flat. The types of the fields say how they
travel (`frames.py`), and the range of a whole number that comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ps_server.errors import RemoteProtocolError
from ps_server.protocol.row_settings import MAX_ROW_TABLES, MAX_ROWS, RowTableSpec
from ps_server.protocol.settings import MAX_CLOCK, MAX_TABLES, MAX_WORKERS, StoreSpec

Array = NDArray[np.float32]
RowIds = NDArray[np.uint32]
"""Numbers of rows of a row table, each once, in increasing order."""
Payload = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16] | NDArray[np.uint8]
"""An array as it crosses the wire; uint16 holds bfloat16 (`precision.py`), uint8 what a codec
made (`ps_server.codecs`), or packed rows (`packed_rows.py`).
"""
MAX_CHUNKS = 2**31
Rank = Annotated[int, range(MAX_WORKERS)]
"""Of a worker, a shard or a plane."""
Shards = Annotated[int, range(1, MAX_WORKERS + 1)]
TableId = Annotated[int, range(MAX_TABLES)]
ChunkId = Annotated[int, range(MAX_CHUNKS)]
ClockId = Annotated[int, range(MAX_CLOCK)]
Element = Annotated[int, range(2**44)]
"""Of the history of a chunk."""
Natural = Annotated[int, range(2**31)]
Count = Annotated[int, range(1, 2**31)]
Slots = Annotated[int, range(1, 2**20)]
RowTableId = Annotated[int, range(MAX_ROW_TABLES)]
RowPlace = Annotated[int, range(MAX_ROWS + 1)]
RowCount = Annotated[int, range(MAX_ROWS)]
AnyFloat = Annotated[float, "also one that is not finite"]
Opaque = Annotated[bytes, "a frame"]


@unique
class SignalKind(Enum):
    """The requests of rank 0 to every worker, for an iteration that all of them reach together."""

    STOP = 1
    """Stop after that iteration, with a snapshot."""
    SNAPSHOT = 2
    """Write a snapshot after that iteration and continue."""
    REGROUP = 3
    """Pause after that iteration, with a memory snapshot: the job continues with other workers."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker -> shard: the worker's rank. `token` is the job's secret; empty where none is used."""

    worker: Rank
    token: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """Shard -> worker: the worker has joined; `shard` is the shard's index."""

    shard: Rank


@dataclass(frozen=True, slots=True)
class Create:
    """Worker -> shard: the store, the same from every worker.

    The shard computes its own part of it.
    """

    store: StoreSpec


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """Worker -> shard of its own host: memory for large arrays (`shared_memory.py`), as an open
    file of a process.

    It begins with `nonce`; `slots` in each direction hold an array of up to `slot_bytes` each.
    """

    process: Natural
    file: Natural
    nonce: bytes
    slots: Slots
    slot_bytes: Natural


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """Shard -> worker: whether the shard has opened the memory that the worker offered."""

    opened: bool


@dataclass(frozen=True, slots=True)
class Initial:
    """Worker of host 0 -> shard: first value of a chunk of its plane as workers hold it, with its history when a run is
    resumed (else none).
    """

    table: TableId
    chunk: ChunkId
    arrays: Sequence[Payload]


@dataclass(frozen=True, slots=True)
class Push:
    """Worker -> shard: one chunk's gradient (staleness 0) or change (staleness > 0) of iteration
    `clock`.

    Gradients are the sums of its host's nodes (`StoreSpec.nodes`), one after another.

    Under `SSPAggr` it may be the sum of `count` iterations' changes, from `clock` on.
    """

    table: TableId
    chunk: ChunkId
    clock: ClockId
    rate: float
    array: Payload
    count: Count = 1


@dataclass(frozen=True, slots=True)
class Part:
    """Worker -> shard: all pushes of the worker's part of a round, where a quorum of the workers
    ends a round (`quorum.py`). Shard 0 gets it when all others have them.

    Attributes:
        clock: of the pushes.
        weight: in the average of the round; at least 0.
        whole: whether the round that it counts in waits for all workers.
        payload: for all workers in that round.
    """

    clock: ClockId
    weight: float
    whole: bool
    payload: Opaque

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise RemoteProtocolError(f"a part of weight {self.weight}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class Taken:
    """Shard -> worker: the shard has all pushes of the worker's part of that clock."""

    clock: ClockId


@dataclass(frozen=True, slots=True)
class Awaited:
    """Shard 0 -> a worker: a quorum has parts in round `clock`, which still waits for others."""

    clock: ClockId


@dataclass(frozen=True, slots=True)
class Round:
    """Shard 0 -> every worker -> every other shard: the round that has begun with the values of
    `clock` ends with the parts of these workers.

    Attributes:
        clock: of the round.
        workers: in the order of ranks.
        weights: of the part of each.
        payloads: of the part of each.
    """

    clock: ClockId
    workers: tuple[int, ...]
    weights: tuple[float, ...]
    payloads: tuple[Opaque, ...]

    def __post_init__(self) -> None:
        in_order = list(self.workers) == sorted(set(self.workers))
        if not (in_order and len(self.workers) == len(self.weights) == len(self.payloads)):
            raise RemoteProtocolError(
                f"a round of workers {list(self.workers)[:8]} does not fit its parts"
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights):
            raise RemoteProtocolError("a round has a weight that is not a finite number above 0")


@dataclass(frozen=True, slots=True)
class Clock:
    """Worker -> shard: the worker has finished `clock` iterations and sent all their pushes;
    counted without a gap.
    """

    clock: ClockId


@dataclass(frozen=True, slots=True)
class Get:
    """Worker -> shard: answer with the chunk's `Value` once it has reached `clock`."""

    table: TableId
    chunk: ChunkId
    clock: ClockId


@dataclass(frozen=True, slots=True)
class Value:
    """Shard -> worker: a chunk with every update of the first `clock` iterations (and maybe
    later ones).

    It includes `own` of the receiver's own pushes. An array of 16 bits, or of a codec, is the
    change since the value before, which had one clock less.
    """

    table: TableId
    chunk: ChunkId
    clock: ClockId
    own: ClockId
    array: Payload


@dataclass(frozen=True, slots=True)
class Fresh:
    """Shard -> worker: every chunk of staleness > 0 that was not sent again is valid for
    `clock`, too.
    """

    clock: ClockId


@dataclass(frozen=True, slots=True)
class PartialNorm:
    """Shard -> rank 0: numbers whose exact sum is the sum of squares of the average gradients of
    the shard's chunks in iteration `clock`.
    """

    clock: ClockId
    sums: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OutsideNorm:
    """Worker of host 0 -> shard 0 -> rank 0: as `PartialNorm`, of the gradients outside the store
    that the worker's plane applies. Rank 0 needs no message for its own.
    """

    plane: Rank
    clock: ClockId
    sums: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """Rank 0 -> shard: the sum of squares over all gradients; apply iteration `clock`.

    Where gradients outside the store count too, shard 0 passes it on to the other workers that
    apply some.
    """

    clock: ClockId
    total: AnyFloat

    def __post_init__(self) -> None:
        if self.total < 0:
            raise RemoteProtocolError(f"a sum of squares is {self.total}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class GetHistory:
    """Worker -> shard: send this chunk's history (staleness 0)."""

    table: TableId
    chunk: ChunkId


@dataclass(frozen=True, slots=True)
class History:
    """Shard -> worker: a piece of the chunk's history after `clock` updates, from element `start`
    on of its tensors one after the other. A piece is of one tensor.
    """

    table: TableId
    chunk: ChunkId
    clock: ClockId
    start: Element
    array: Array


@dataclass(frozen=True, slots=True)
class CreateRows:
    """Worker -> shard: row table number `row_table`, the same from every worker; rows are spread
    over `shards` shards.
    """

    row_table: RowTableId
    shards: Shards
    spec: RowTableSpec


@dataclass(frozen=True, slots=True)
class PushRows:
    """Worker -> shard: the gradients of iteration `clock`, a sum for each row; maybe of no rows."""

    row_table: RowTableId
    clock: ClockId
    rate: float
    rows: RowIds
    array: Array


@dataclass(frozen=True, slots=True)
class GetRows:
    """Worker -> shard: answer request `number` with these rows once the table has reached
    `clock`.
    """

    row_table: RowTableId
    number: ClockId
    clock: ClockId
    rows: RowIds


@dataclass(frozen=True, slots=True)
class Rows:
    """Shard -> worker: the values of the rows of request `number`."""

    row_table: RowTableId
    number: ClockId
    array: Array


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Worker -> shard: answer with `KeptRows` of up to `count` rows that have been changed, from
    place `first` on.
    """

    row_table: RowTableId
    first: RowPlace
    count: RowCount


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Shard -> worker: changed rows with values and histories after `clock` updates.

    Rank 0 -> shard: continue with these, before the first push.
    """

    row_table: RowTableId
    clock: ClockId
    rows: RowIds
    arrays: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Gather:
    """Worker -> shard 0: the worker's contribution to collection `tag` (0, 1, 2, ...).

    Attributes:
        tag: of the collection.
        payload: the contribution.
        keeps: whether the worker needs the contributions of all.
        whole: whether all workers take part; otherwise those with this worker's local rank, whose
            collections have numbers of their own.
    """

    tag: ClockId
    payload: Opaque
    keeps: bool = True
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Gathered:
    """Shard 0 -> every worker that takes part: all contributions to collection `tag`, by rank;
    none for a worker that does not need them.
    """

    tag: ClockId
    payloads: tuple[Opaque, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Signal:
    """Rank 0 -> shard -> every other worker: do `kind` once `clock` iterations are finished."""

    kind: SignalKind
    clock: ClockId


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker -> shard: the worker has finished.

    Shard -> worker: the shard has all that was sent before.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """Shard -> worker: a message was refused, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Shard -> worker: a worker has left after fewer iterations, or collections, than the
    receiver has begun.
    """

    worker: Rank
    iterations: ClockId


ToShard = (
    Hello
    | Create
    | MemoryOffer
    | Initial
    | Push
    | Part
    | Round
    | Clock
    | Get
    | OutsideNorm
    | TotalNorm
    | GetHistory
    | Gather
    | Signal
    | Leave
    | CreateRows
    | PushRows
    | GetRows
    | ReadRows
    | KeptRows
)
ToWorker = (
    Welcome
    | MemoryAnswer
    | Value
    | Taken
    | Awaited
    | Round
    | Fresh
    | PartialNorm
    | OutsideNorm
    | TotalNorm
    | History
    | Gathered
    | Signal
    | Fault
    | Gone
    | Leave
    | Rows
    | KeptRows
)
Message = ToShard | ToWorker


class Addressed(NamedTuple):
    """A message for one shard."""

    shard: int
    message: ToShard


def frame_bytes(message: Message) -> list[int]:
    """Return the bytes of each of a message's frames after its header."""
    match message:
        case Push() | Value() | Rows() | History():
            return [message.array.nbytes]
        case Initial():
            return [array.nbytes for array in message.arrays]
        case PushRows():
            return [message.rows.nbytes, message.array.nbytes]
        case GetRows():
            return [message.rows.nbytes]
        case KeptRows():
            return [message.rows.nbytes, *(array.nbytes for array in message.arrays)]
        case Gather() | Part():
            return [len(message.payload)]
        case Gathered() | Round():
            return [len(payload) for payload in message.payloads]
        case _:
            return []
