"""Cursors on LMDB databases.

Law: the database is opened read-only, so its folder need not be writable, and any number of
processes can read it at the same time, on all hosts and containers that mount its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import lmdb

from poseidon.caffe.data.databases import SharedHandles, SteppingCursor
from poseidon.errors import DataError

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
