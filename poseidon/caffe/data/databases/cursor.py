"""The interface of database cursors, and the function that opens one.

Law: all backends return the same records in the same (bytewise key) order with the same numbers, so
that a definition can change its backend and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from poseidon.caffe.data.databases.kinds import Backend, require_kind
from poseidon.caffe.data.databases.leveldb_cursor import LevelDbCursor
from poseidon.caffe.data.databases.lmdb_cursor import LmdbCursor


class Cursor(Protocol):
    """A cursor on a database with at least one record.

    Not thread-safe, but not bound to a thread.
    """

    path: Path

    def __len__(self) -> int:
        """Return the number of records, at least 1.

        The first call on a LevelDB reads the whole database.
        """

    @property
    def position(self) -> int:
        """The number of the current record, 0 <= position < len."""

    def key(self) -> bytes:
        """Return the key of the current record."""

    def value(self) -> bytes | memoryview:
        """Return the value of the current record, which must not be used after `close`."""

    def skip(self, count: int) -> None:
        """Move forward by `count` >= 0 records, from the last to the first, without reading
        values.
        """

    def seek(self, record: int) -> None:
        """Move to record number `record` >= 0, modulo len, without reading values."""

    def close(self) -> None:
        """Close the database. A second call does nothing."""


def open_cursor(path: Path, backend: int) -> Cursor:
    """Open a cursor on the first record of a database.

    Args:
        path: the database's folder.
        backend: a `Backend`, or its number in Caffe's `DataParameter.DB`.

    Raises:
        DataError: the database is missing, of a different kind, empty, damaged, or locked by
            another process.
    """
    kind = Backend(backend)
    require_kind(path, kind)
    return LmdbCursor(path) if kind is Backend.LMDB else LevelDbCursor(path)


def records(cursor: Cursor) -> Iterator[tuple[bytes, bytes | memoryview]]:
    """Yield every (key, value) once, in key order, from the first record."""
    cursor.seek(0)
    yield cursor.key(), cursor.value()
    while True:
        before = cursor.position
        cursor.skip(1)
        if cursor.position <= before:
            return
        yield cursor.key(), cursor.value()
