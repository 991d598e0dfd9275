"""Writing databases of records, LMDB and LevelDB alike.

Law: a database appears under its name when it is complete, and not before; an existing one is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import lmdb

from poseidon.data.databases import leveldb
from poseidon.data.databases.kinds import Backend
from poseidon.data.staging import staging
from poseidon.errors import DataError

# Records in one transaction or write batch, as Caffe's converters do.
RECORDS_PER_COMMIT = 1000
# LMDB reserves this much address space at first, and twice as much whenever it is full.
FIRST_MAP_BYTES = 1 << 28
_REFUSALS: tuple[type[Exception], ...] = (OSError, lmdb.Error, *leveldb.ERRORS)


class DatabaseWriter(Protocol):
    """Takes records; they are safe after `close`."""

    def put(self, key: bytes, value: bytes) -> None:
        """Store one record, in place of an earlier one with the same key."""

    def close(self) -> None:
        """Store what is left and let go of the database; a second call does nothing."""


class LmdbWriter:
    """A new LMDB database in the folder `path`, which must not exist."""

    def __init__(self, path: Path) -> None:
        # Nothing is read before it is complete, so one sync at the end is enough.
        self._environment: Any = lmdb.open(
            str(path), map_size=FIRST_MAP_BYTES, sync=False, metasync=False, lock=False
        )
        self._map_bytes = FIRST_MAP_BYTES
        self._pending: list[tuple[bytes, bytes]] = []
        self._last_key = b""
        self._closed = False

    def put(self, key: bytes, value: bytes) -> None:
        self._pending.append((key, value))
        if len(self._pending) == RECORDS_PER_COMMIT:
            self._commit()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                self._commit()
                self._environment.sync(True)
            finally:
                self._environment.close()

    def _commit(self) -> None:
        while self._pending:
            try:
                last = self._last_key
                with self._environment.begin(write=True) as transaction:
                    for key, value in self._pending:
                        # Appending fills pages to the brim; keys out of order are sorted in.
                        transaction.put(key, value, append=key > last)
                        last = max(last, key)
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
            else:
                self._last_key = last
                self._pending.clear()


class LevelDbWriter:
    """A new LevelDB database in the folder `path`, which must not exist."""

    def __init__(self, path: Path) -> None:
        self._database: Any = leveldb.require_leveldb().DB(
            str(path), create_if_missing=True, error_if_exists=True, write_buffer_size=64 << 20
        )
        self._batch: Any = self._database.write_batch()
        self._pending = 0

    def put(self, key: bytes, value: bytes) -> None:
        self._batch.put(key, value)
        self._pending += 1
        if self._pending == RECORDS_PER_COMMIT:
            self._batch.write()
            self._batch.clear()
            self._pending = 0

    def close(self) -> None:
        if not self._database.closed:
            try:
                self._batch.write()
            finally:
                self._database.close()


def open_writer(path: Path, backend: Backend) -> DatabaseWriter:
    """Return a writer of a new database at `path`, which is visible there at once: for use in a staging folder."""
    return LmdbWriter(path) if backend is Backend.LMDB else LevelDbWriter(path)


@contextmanager
def write_database(path: Path, backend: Backend) -> Iterator[DatabaseWriter]:
    """Yield a writer of a new database that appears at `path` when the block ends without an error.

    Raises:
        DataError: something exists at `path`, another process is writing it, or the disk refuses.
    """
    refuse_existing(path)
    with translated_writes(path), staging(path) as stage:
        writer = open_writer(stage.folder / path.name, backend)
        try:
            yield writer
        finally:
            writer.close()
        stage.publish([path.name])


def refuse_existing(path: Path) -> None:
    """Raise DataError when something lies at `path` already."""
    if path.exists() or path.is_symlink():
        raise DataError(f"{path} exists already and is not overwritten: move or remove it first")


@contextmanager
def translated_writes(path: Path) -> Iterator[None]:
    """Errors of the libraries and the disk under this block become DataErrors about writing `path`."""
    try:
        yield
    except _REFUSALS as error:
        reason = error.args[0] if isinstance(error, leveldb.ERRORS) and error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise DataError(f"{path} cannot be written: {text}") from error
