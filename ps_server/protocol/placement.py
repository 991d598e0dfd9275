"""The placement of chunks on shards: a pure function of sizes, so that workers and shards
compute the same.

Law: no shard carries more than `BALANCE` times its part of the elements where chunks of
`LEAST_CHUNK_ELEMENTS` allow that, and none more than `UNEVEN` times its part where chunks of
`SMALLEST_ELEMENTS` do: a chunk is a message of every worker and a value for each, which cost as
much as some 100 KB. Chunks are dealt largest first to the lightest shard (Graham's LPT rule, 1969);
where that breaks the law, the largest ones are halved and dealt again. On one machine a placement
with fewer shards, or less even, is taken where more messages would cost more (`_deal`). Tables with
a codec are cut between its segments only; a matrix, and tables whose rows are given, are not cut
further. Tables that are copies move no bytes in training; they are dealt by themselves.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ps_server.codecs.base import SEGMENT_ELEMENTS
from ps_server.protocol.settings import (
    CHUNK_ELEMENTS,
    NORM_SEGMENT_ELEMENTS,
    Keeping,
    StoreSpec,
    TableSpec,
)

BALANCE = 1.05
UNEVEN = 2
LEAST_CHUNK_ELEMENTS = 64 * 1024
SMALLEST_ELEMENTS = 4 * 1024
PACKET_COST = 256 * 1024
"""Elements that a shard adds up in the time that processors take for a packet of a worker to a
shard, and one back. Measured with small packets in shared memory.
"""
CHUNK_COST = 32 * 1024
"""The same for a push and a value within such packets."""
PROCESSORS = 8
"""Of one machine with all workers and shards. Assumed: processes may see different ones."""

Piece = tuple[int, int, int]
"""(table, start, stop)."""
Dealt = tuple[Piece, int]
"""A piece, and its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Elements `start` to `stop` (exclusive) of one table: one key of one shard."""

    table: int
    index: int
    start: int
    stop: int
    shard: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Placement:
    """The map from tables to chunks to shards.

    Attributes:
        chunks: by table, in element order: `chunks[table][index]`.
    """

    __slots__ = ("chunks",)

    def __init__(self, chunks: Sequence[Sequence[Chunk]]) -> None:
        self.chunks = tuple(tuple(row) for row in chunks)

    def of_shard(self, shard: int) -> tuple[Chunk, ...]:
        """Return the chunks that `shard` holds, by table and index."""
        return tuple(chunk for row in self.chunks for chunk in row if chunk.shard == shard)


def place(store: StoreSpec) -> Placement:
    """Cut the tables of a store into chunks and deal the chunks to its shards.

    Returns:
        The placement: the same for the same store, on every machine.
    """
    copies = {t for t, spec in enumerate(store.tables) if spec.keeping is Keeping.COPY}
    dealt = _deal(store, [t for t in range(len(store.tables)) if t not in copies])
    dealt += _deal(store, sorted(copies))
    chunks: list[list[Chunk]] = [[] for _ in store.tables]
    for (table, start, stop), shard in dealt:
        chunks[table].append(
            Chunk(table=table, index=len(chunks[table]), start=start, stop=stop, shard=shard)
        )
    return Placement(chunks)


def _deal(store: StoreSpec, chosen: Sequence[int]) -> list[Dealt]:
    """Cut these tables into pieces, and return them with the shard of each.

    On one machine, each of N workers sends c pieces in k packets, one to each of k shards, and gets
    as many back. In the time of an element on a shard, that takes N (k `PACKET_COST` + c
    `CHUNK_COST`) / `PROCESSORS`, and the fullest shard, with e elements, N e. The sum is to be
    least, and k is a power of two or all shards. Between machines all shards hold some tables,
    because their links are slower than their processors.
    """
    weights = store.loads or (1,) * store.shards
    if store.chunks > 1:
        *_, (_, last) = _finer_and_finer(store, chosen, weights)
        return last
    elements = sum(store.tables[t].size for t in chosen)
    costs: list[tuple[float, list[Dealt]]] = []
    for shards in sorted({min(2**n, store.shards) for n in range(store.shards.bit_length() + 1)}):
        for over, dealt in _finer_and_finer(store, chosen, weights[:shards]):
            packets = store.seats.planes * shards * PACKET_COST + len(dealt) * CHUNK_COST
            costs.append((packets / PROCESSORS + over * elements / shards, dealt))
    return min(costs, key=lambda each: each[0])[1]


def _finer_and_finer(
    store: StoreSpec, chosen: Sequence[int], weights: Sequence[int]
) -> Iterator[tuple[float, list[Dealt]]]:
    """Deal these tables to shards in ever smaller pieces, until the load is even. Yield each time
    the fullest shard's elements, in relation to its part, and the pieces with the shard of each.
    """
    tables, elements = store.tables, sum(store.tables[t].size for t in chosen)
    step = chunk_elements(elements, len(weights), store.chunks)
    pieces = [(table, start, stop) for table in chosen for start, stop in _cut(tables[table], step)]
    while True:
        homes = _homes(pieces, tables, weights)
        loads = _loads(pieces, homes, weights)
        over = max(loads) * sum(weights) / max(1, elements)
        yield over, list(zip(pieces, homes, strict=True))
        fullest = loads.index(max(loads))
        halved = {
            piece: home
            for piece, home in zip(pieces, homes, strict=True)
            if _can_halve(piece, tables[piece[0]])
        }
        largest = max((stop - start for _, start, stop in halved), default=0)
        smallest = LEAST_CHUNK_ELEMENTS if over <= UNEVEN else SMALLEST_ELEMENTS
        if over <= BALANCE or largest < 2 * smallest or fullest not in halved.values():
            return
        pieces = [half for piece in pieces for half in _halve(piece, largest, tables[piece[0]])]


def chunk_elements(elements: int, shards: int, chunks: int) -> int:
    """Return the elements of a chunk of tables whose rows are not given: a power of two, 256 KiB
    to 2 MiB of float32.

    A shard can send a chunk's new value only when the last worker's gradient of it has come, so the
    workers' links are idle for about a chunk of every worker at the end of an iteration. The link
    of a host without workers is idle at its beginning too. Small chunks make that little, but each
    is a message of every worker. `CHUNKS_A_SHARD` costs a tenth less processor time than twice as
    many and takes 2 % longer on slow links; with `CHUNKS_A_SHARD` in place of `CHUNKS_A_SERVER`,
    hosts that only serve would take 6 % longer.

    Args:
        elements: of all tables.
        shards: >= 1.
        chunks: least chunks a shard, while they have more than 256 KiB; >= 1.
    """
    step = CHUNK_ELEMENTS
    while step > LEAST_CHUNK_ELEMENTS and elements < chunks * shards * step:
        step //= 2
    return step


def _cut(spec: TableSpec, step: int) -> list[tuple[int, int]]:
    if spec.is_whole:
        return [(0, spec.size)]
    if spec.rows:
        step = -(-spec.size // min(spec.rows, spec.size))
        step += -step % _grain(spec)
    return [(start, min(start + step, spec.size)) for start in range(0, spec.size, step)]


def _grain(spec: TableSpec) -> int:
    """Return the number of elements at whose multiples a table may be cut: segments of its codec,
    or of sums of squares; a table whose rows are given may be cut anywhere.
    """
    if spec.codec is not None:
        return SEGMENT_ELEMENTS
    return 1 if spec.rows else NORM_SEGMENT_ELEMENTS


def _can_halve(piece: Piece, spec: TableSpec) -> bool:
    return piece[2] - piece[1] > _grain(spec) and not (spec.rows or spec.is_whole)


def _halve(piece: Piece, largest: int, spec: TableSpec) -> list[Piece]:
    table, start, stop = piece
    if stop - start != largest or not _can_halve(piece, spec):
        return [piece]
    middle = (start + stop + 1) // 2
    middle += -middle % _grain(spec)
    return [(table, start, middle), (table, middle, stop)]


def _homes(
    pieces: Sequence[Piece], tables: Sequence[TableSpec], weights: Sequence[int]
) -> list[int]:
    """Return the shard of each piece: largest first, each to the shard that is least full for
    its weight. The parts that several planes have of one tensor follow each other, so that shards
    share each layer: its gradients leave at one time.
    """
    planes = [tables[table].plane for table, _, _ in pieces]
    in_plane: Counter[int] = Counter()
    keys = []
    for (_, start, stop), plane in zip(pieces, planes, strict=True):
        keys.append((start - stop, in_plane[plane], plane))
        in_plane[plane] += 1
    order = sorted(range(len(pieces)), key=keys.__getitem__)
    lightest = [(Fraction(0), shard) for shard in range(len(weights))]
    homes = [0] * len(pieces)
    for i in order:
        load, shard = heapq.heappop(lightest)
        homes[i] = shard
        heapq.heappush(
            lightest, (load + Fraction(pieces[i][2] - pieces[i][1], weights[shard]), shard)
        )
    return homes


def _loads(pieces: Sequence[Piece], homes: Sequence[int], weights: Sequence[int]) -> list[float]:
    """Return the elements on each shard, divided by its weight."""
    elements = [0] * len(weights)
    for (_, start, stop), shard in zip(pieces, homes, strict=True):
        elements[shard] += stop - start
    return [part / weight for part, weight in zip(elements, weights, strict=True)]
