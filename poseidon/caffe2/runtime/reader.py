"""Readers: cursors on a database that the operators of several devices share.

Law: which operator gets which record depends on the order in which the operators were made, and not
on the threads that run them. The operators take turns: each turn is one batch.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from poseidon.caffe.data.cursor import Cursor
from poseidon.caffe2.runtime.databases import open_database
from poseidon.caffe2.runtime.errors import EnforceNotMet

MAX_WAITING = 2
"""Batches that are kept for an operator that does not run; then the others continue without it."""


class Record(NamedTuple):
    """A record: its number in all that all shards read, from 0 across epochs; key and value."""

    number: int
    key: bytes
    value: bytes


class Turns:
    """The place of one operator among those that share a reader.

    Attributes:
        size: the records of a batch.
        batches: how many batches were read for it, or passed by.
        waiting: batches that were read for it and not taken.
    """

    def __init__(self, size: int, batches: int) -> None:
        self.size = size
        self.batches = batches
        self.waiting: deque[list[Record]] = deque()


class Reader:
    """A cursor that operators share.

    Each read is of one record of the shard; after the last one comes the first.

    Attributes:
        path, db_type: the database.
        seed: of the random numbers of the operators that read here.
    """

    def __init__(
        self,
        path: str,
        db_type: str,
        num_shards: int = 1,
        shard_id: int = 0,
        *,
        shard_sizes: Sequence[int] = (),
        seed: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        """Open a database at a shard's first record; it reads each `num_shards`-th from there.

        Args:
            path, db_type: the database.
            num_shards: the number of shards.
            shard_id: which of them this is.
            shard_sizes: the records that each shard reads of a global batch, in order; empty: one
                each. A batch then does not end at the end of the database: the next record is the
                first.
            seed: of the random numbers of the operators.
            cursor: what is read in place of the database `path`, which only messages name then.

        Raises:
            RuntimeError: the database cannot be read, or has no record of the shard.
        """
        if not 0 <= shard_id < num_shards:
            raise EnforceNotMet(f"shard_id must be from 0 to {num_shards - 1}, not {shard_id}")
        if shard_sizes and (len(shard_sizes) != num_shards or min(shard_sizes) < 1):
            raise EnforceNotMet(
                f"shard_sizes must be {num_shards} numbers above 0, one for each shard, not "
                f"{list(shard_sizes)}"
            )
        self.path, self.db_type, self.seed = path, db_type, seed
        self._shards, self._shard = num_shards, shard_id
        self._sizes = tuple(shard_sizes)
        self._cursor = open_database(path, db_type) if cursor is None else cursor
        self._count = 0
        self._lock = threading.Lock()
        self._turns: list[weakref.ref[Turns]] = []
        self._cursor.seek(shard_id)
        if self._cursor.position != shard_id:
            raise EnforceNotMet(f"The database {path} has no record of shard {shard_id}")
        self._go_to(0)

    @property
    def position(self) -> int:
        """The number of the next record in the database."""
        return self._cursor.position

    def read(self) -> Record:
        with self._lock:
            return self._read()

    def rewind(self) -> None:
        """Go back to the first record of the shard."""
        with self._lock:
            self._go_to(0)

    def skip(self, count: int) -> None:
        """Pass records of the shard by as if read: a restart continues where a run ended."""
        with self._lock:
            self._go_to(self._count + count)

    def join(self, size: int) -> Turns:
        """Return a place among the operators, behind those that have one.

        It ends when the operator drops it.

        Args:
            size: the records of a batch.
        """
        with self._lock:
            turns = Turns(size, max((other.batches for other in self._all()), default=0))
            self._turns.append(weakref.ref(turns))
            return turns

    def take(self, turns: Turns) -> list[Record]:
        """Return the next batch of an operator; read the others' batches that come before it."""
        with self._lock:
            while not turns.waiting:
                following = min(self._all(), key=lambda each: each.batches)
                following.batches += 1
                if following is turns or len(following.waiting) < MAX_WAITING:
                    following.waiting.append([self._read() for _ in range(following.size)])
            return turns.waiting.popleft()

    def _all(self) -> list[Turns]:
        """Return the operators that still exist, in the order in which they came."""
        found = [(reference, reference()) for reference in self._turns]
        self._turns = [reference for reference, turns in found if turns is not None]
        return [turns for _, turns in found if turns is not None]

    def _number(self, count: int) -> int:
        """Return the number of this shard's record `count` among the records of all shards."""
        if not self._sizes:
            return count * self._shards + self._shard
        batch, place = divmod(count, self._sizes[self._shard])
        return batch * sum(self._sizes) + sum(self._sizes[: self._shard]) + place

    def _go_to(self, count: int) -> None:
        self._count = count
        if self._sizes or self._shards == 1:
            self._cursor.seek(self._number(count))
        elif count:
            records = -(-(len(self._cursor) - self._shard) // self._shards)
            self._cursor.seek(self._shard + count % records * self._shards)
        else:
            self._cursor.seek(self._shard)

    def _read(self) -> Record:
        record = Record(self._number(self._count), self._cursor.key(), bytes(self._cursor.value()))
        steps = self._number(self._count + 1) - record.number
        self._count += 1
        if self._sizes or self._shards == 1:
            self._cursor.skip(steps)
            return record
        for _ in range(steps):
            before = self._cursor.position
            self._cursor.skip(1)
            if self._cursor.position <= before:
                self._cursor.seek(self._shard)
                break
        return record


class Consumer:
    """An operator that reads batches: its place among those that share the reader of its input.

    Args:
        size: the records of a batch.
        reader: what the input holds when the operator is made; a reader's place is taken at once.
    """

    def __init__(self, size: int, reader: object) -> None:
        self._size = size
        self._reader: Reader | None = None
        self._turns: Turns | None = None
        if isinstance(reader, Reader):
            self._join(reader)

    def _join(self, reader: Reader) -> Turns:
        self._reader, self._turns = reader, reader.join(self._size)
        return self._turns

    def take(self, reader: object) -> list[Record]:
        """Return the next batch of a reader.

        Raises:
            RuntimeError: it is not a reader, or the database cannot be read.
        """
        if not isinstance(reader, Reader):
            raise EnforceNotMet(f"expected a reader of CreateDB, not {type(reader).__name__}")
        turns = self._turns
        if turns is None or reader is not self._reader:
            turns = self._join(reader)
        return reader.take(turns)
