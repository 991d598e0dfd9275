"""Cursors on databases of LMDB and LevelDB, and writers of new ones.

Laws:
* All backends return the same records in the same (bytewise key) order with the same numbers, so a
  definition can change its backend and nothing else.
* A database is read without being written to, so its folder need not be writable, and any number of
  processes can read it at the same time, on all hosts and containers that mount its folder.
* A new database appears under its name only when it is complete. An existing one is never changed.

LevelDB's cursor is in `leveldb_cursor.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import lmdb

from poseidon.caffe.data import leveldb_cursor as leveldb
from poseidon.caffe.data.databases import Backend, SharedHandles, SteppingCursor, require_kind
from poseidon.caffe.data.leveldb_cursor import LevelDbCursor
from poseidon.caffe.data.staging import staging
from poseidon.errors import DataError


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
        """Move forward by `count` >= 0 records, in a ring, without reading values."""

    def seek(self, record: int) -> None:
        """Move to record number `record` >= 0, modulo len, without reading values."""

    def close(self) -> None:
        """Close the database. A second call does nothing."""


def open_cursor(path: Path, backend: int) -> Cursor:
    """Open a cursor on the first record of a database.

    Args:
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


# Records in a transaction or write batch, as in Caffe's converters.
RECORDS_PER_COMMIT = 1000
# A commit of LMDB that finds no room for all of its pages reports EIO.
FULL_BYTES = 1 << 20
# The initial size of LMDB's address space; it is doubled whenever it is full.
FIRST_MAP_BYTES = 1 << 28
_WRITE_ERRORS: tuple[type[Exception], ...] = (OSError, lmdb.Error, *leveldb.ERRORS)


class DatabaseWriter(Protocol):
    """A writer of records. They are stored after `close`."""

    def put(self, key: bytes, value: bytes) -> None:
        """Store a record, in place of an earlier one with the same key."""

    def close(self) -> None:
        """Store buffered records and close the database. A second call does nothing."""


class LmdbWriter:
    """A writer of a new LMDB database in the folder `path`, which must not exist."""

    def __init__(self, path: Path) -> None:
        # An incomplete database is never read, so one sync at the end is enough.
        self._environment: Any = lmdb.open(
            os.fsencode(path), map_size=FIRST_MAP_BYTES, sync=False, metasync=False, lock=False
        )
        self._folder = path.parent
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
                        # Appending fills pages completely. Keys that are out of order are inserted.
                        transaction.put(key, value, append=key > last)
                        last = max(last, key)
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._environment.set_mapsize(self._map_bytes)
            except lmdb.Error as error:
                free = os.statvfs(self._folder)
                if free.f_bavail * free.f_frsize >= FULL_BYTES:
                    raise
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            else:
                self._last_key = last
                self._pending.clear()


class LevelDbWriter:
    """A writer of a new LevelDB database in the folder `path`, which must not exist."""

    def __init__(self, path: Path) -> None:
        self._database: Any = leveldb.require_leveldb().DB(
            os.fsencode(path),
            create_if_missing=True,
            error_if_exists=True,
            write_buffer_size=64 << 20,
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
    """Open a writer of a new database at `path`. The database is visible at once,
    so `path` should be in a staging folder.
    """
    return LmdbWriter(path) if backend is Backend.LMDB else LevelDbWriter(path)


@contextmanager
def write_database(path: Path, backend: Backend) -> Iterator[DatabaseWriter]:
    """Yield a writer of a new database; it is at `path` after a block without an error.

    Raises:
        DataError: `path` exists, another process writes it, or a write fails.
    """
    refuse_existing(path)
    with translated_writes(path), staging(path) as stage:
        writer = open_writer(stage.folder / path.name, backend)
        try:
            yield writer
        finally:
            writer.close()
        stage.publish([path.name])


def refuse_existing(path: Path, advice: str = "move or remove it first") -> None:
    """Raise DataError with `advice` if `path` exists."""
    if path.exists() or path.is_symlink():
        raise DataError(f"{path} exists already and is not overwritten: {advice}")


@contextmanager
def translated_writes(path: Path) -> Iterator[None]:
    """Translate errors of the database libraries and the disk in this block to a DataError about
    writing `path`.
    """
    try:
        yield
    except _WRITE_ERRORS as error:
        why = leveldb.reason_of(error) if isinstance(error, leveldb.ERRORS) else str(error)
        # without the number of an error of the system
        raise DataError(f"{path} cannot be written: {why.partition('] ')[2] or why}") from error


# Processes that read one database on one host. A slot in the lock file takes 64 bytes.
MAX_READERS = 1024


_ENVIRONMENTS = SharedHandles()


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise DataError(
                f"the LMDB database {path} cannot be read while this script has it open: call "
                "close() of its lmdb environment first"
            ) from error
        raise DataError(f"the LMDB database {path} cannot be read: {error}") from error


def _lockable(path: Path) -> bool:
    """Return whether LMDB can register this reader in the lock file."""
    lock = path / "lock.mdb"
    if lock.is_symlink():  # LMDB writes to it, and it could lead to any file of this user
        return False
    return os.access(lock, os.R_OK | os.W_OK) if lock.exists() else os.access(path, os.W_OK)


def _open(path: Path) -> Any:
    """Open an environment, once its file is known to be an LMDB database."""
    # Without a lock first: nothing is left behind in the folder of a file that is not a database.
    _check(path)
    try:
        return _environment(path, lock=_lockable(path))
    except lmdb.LockError:
        # LMDB locks the byte of its process id in the lock file. On a shared file system a process
        # of another host or container may have the same id. Readers do not need the lock.
        return _environment(path, lock=False)


def _check(path: Path) -> None:
    """Raise an error unless data.mdb has all pages that its header counts."""
    size = (path / "data.mdb").stat().st_size
    if not size:  # LMDB would call it a bad file descriptor
        raise DataError(
            f"the LMDB database {path} is not a database: its data.mdb has 0 bytes; make it again"
        )
    with closing(_environment(path, lock=False)) as environment:
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        # Access to a page beyond the end of the file would kill the process (SIGBUS).
        raise DataError(
            f"the LMDB database {path} is truncated: data.mdb has {size} of {needed} bytes"
        )


def _environment(path: Path, *, lock: bool) -> Any:
    return lmdb.open(
        os.fsencode(path),
        readonly=True,
        lock=lock,
        # Records are read in key order, which is usually the order in which they were written.
        readahead=True,
        max_readers=MAX_READERS,
        create=False,
    )


class LmdbCursor(SteppingCursor):
    """A cursor on an LMDB database. Values are views of the memory map, not copies.

    Args:
        path: a folder with a file data.mdb.

    Raises:
        DataError: the database is not LMDB, truncated, damaged or empty.
    """

    def __init__(self, path: Path) -> None:
        self._closed = True
        with _translated(path):
            environment = _ENVIRONMENTS.acquire(path, lambda: _open(path))
            self._closed = False
            self._transaction = environment.begin(buffers=True)
            self._cursor = self._transaction.cursor()
            super().__init__(path, environment.stat()["entries"])
            if not self._cursor.first():
                self.close()
                raise DataError(f"the LMDB database {path} is empty")

    def key(self) -> bytes:
        return bytes(self._cursor.key())

    def value(self) -> memoryview:
        return cast(memoryview, self._cursor.value())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._cursor.close()
            self._transaction.abort()
            _ENVIRONMENTS.release(self.path)

    def _first(self) -> None:
        with _translated(self.path):
            self._cursor.first()

    def _advance(self, count: int) -> int:
        step = self._cursor.next
        with _translated(self.path):
            for made in range(count):
                if not step():
                    return made
        return count

    def _count(self) -> int:
        return len(self)
