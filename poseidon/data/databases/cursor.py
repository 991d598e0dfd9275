"""The contract of a database cursor, and the one door to open one.

Law: whatever the backend, the same records in the same (bytewise key) order under the same numbers, so that
a definition may change its backend and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from poseidon.data.databases.kinds import Backend, require_kind
from poseidon.data.databases.leveldb_cursor import LevelDbCursor
from poseidon.data.databases.lmdb_cursor import LmdbCursor


class Cursor(Protocol):
    """A place in a database that is not empty. Not thread-safe; may be handed from thread to thread."""

    path: Path

    def __len__(self) -> int:
        """Number of records, at least 1. With LevelDB the first call reads through the database."""

    @property
    def position(self) -> int:
        """Number of the record under the cursor, 0 <= position < len."""

    def key(self) -> bytes:
        """Key of the record under the cursor."""

    def value(self) -> bytes | memoryview:
        """Value of the record under the cursor; must not be used after `close`."""

    def skip(self, count: int) -> None:
        """Move `count` >= 0 records forward, from the last to the first; reads no values."""

    def seek(self, record: int) -> None:
        """Stand on record number `record` >= 0, taken modulo len; reads no values."""

    def close(self) -> None:
        """Let go of the database; a second call does nothing."""


def open_cursor(path: Path, backend: int) -> Cursor:
    """Return a cursor on the first record of a database.

    Args:
        path: the database's folder.
        backend: a `Backend`, or the number that Caffe's `DataParameter.DB` gives it.

    Raises:
        DataError: the database is missing, of another kind, empty, damaged, or locked by another process.
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
