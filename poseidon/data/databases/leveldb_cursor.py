"""Cursors on LevelDB databases, and the optional library plyvel behind them.

Law: a LevelDB can be open in one process only. A second process gets an error that says what to do instead; the cursors
of a process share one handle. Without plyvel everything but LevelDB works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from poseidon.data.databases.handles import SharedHandles
from poseidon.data.databases.stepping import SteppingCursor
from poseidon.errors import DataError

PLYVEL: ModuleType | None
ERRORS: tuple[type[Exception], ...]
"""The exceptions of the library."""

try:
    import plyvel
except ImportError:
    PLYVEL, ERRORS = None, ()
else:
    PLYVEL, ERRORS = plyvel, (plyvel.Error,)


class LevelDbMissingError(DataError):
    """The Python package for LevelDB is not installed."""


def require_leveldb() -> ModuleType:
    """Return the module `plyvel`.

    Raises:
        LevelDbMissingError: it is not installed. The text says how to install it and what works without it.
    """
    if PLYVEL is None:
        raise LevelDbMissingError(
            "LevelDB needs the Python package plyvel, which is not installed: use LMDB (--backend=lmdb), or "
            "pip install plyvel (Python 3.13 and newer build it: apt-get install g++ libleveldb-dev first)"
        )
    return PLYVEL


def _close(database: Any) -> None:
    database.close()


ONE_OWNER = (
    "and a LevelDB can be open in one process only: give each client its own part (poseidon partition_data and "
    "shared_file_system: false), or use LMDB"
)
"""The end of the error for a second process."""

_DATABASES: SharedHandles[Any] = SharedHandles(_close)


def _reason(error: Exception) -> str:
    """Return LevelDB's own message, which plyvel passes as bytes."""
    first = error.args[0] if error.args else error
    return first.decode(errors="replace") if isinstance(first, bytes) else str(first)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise DataError(f"the LevelDB database {path} cannot be read: {_reason(error)}") from error


def _open(path: Path) -> Any:
    if not os.access(path, os.W_OK):
        raise DataError(
            f"the LevelDB database {path} is in a folder that is not writable, and LevelDB writes to its "
            "folder even for reading: copy it to a writable folder, or use LMDB"
        )
    plyvel = require_leveldb()
    try:
        return plyvel.DB(str(path), create_if_missing=False)
    except plyvel.IOError as error:
        if "lock" not in _reason(error).lower():
            raise
        raise DataError(f"the LevelDB database {path} is in use by another process, {ONE_OWNER}") from error


class LevelDbCursor(SteppingCursor):
    """A cursor on a LevelDB database. It knows the number of records after the first wrap or `len`.

    Args:
        path: a folder with a file CURRENT.

    Raises:
        DataError: the database is damaged, empty, in use by another process or in a read-only folder, or plyvel is not
            installed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, None)
        self._closed = True
        with _translated(path):
            self._database = _DATABASES.acquire(path, lambda: _open(path))
            self._closed = False
            self._iterator = self._new_iterator()
            self._iterator.seek_to_first()
            if not self._iterator.valid():
                self.close()
                raise DataError(f"the LevelDB database {path} is empty")

    def key(self) -> bytes:
        with _translated(self.path):
            return cast(bytes, self._iterator.key())

    def value(self) -> bytes:
        with _translated(self.path):
            return cast(bytes, self._iterator.value())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._iterator.close()
            _DATABASES.release(self.path)

    def _new_iterator(self) -> Any:
        # A pass over the whole database would evict everything else from LevelDB's cache.
        return self._database.raw_iterator(verify_checksums=True, fill_cache=False)

    def _first(self) -> None:
        with _translated(self.path):
            self._iterator.seek_to_first()

    def _advance(self, count: int) -> int:
        step, valid = self._iterator.next, self._iterator.valid
        with _translated(self.path):
            for made in range(count):
                step()
                if not valid():
                    return made
        return count

    def _count(self) -> int:
        count = 0
        with _translated(self.path):
            iterator = self._new_iterator()
            iterator.seek_to_first()
            while iterator.valid():
                count += 1
                iterator.next()
            iterator.close()
        return count
