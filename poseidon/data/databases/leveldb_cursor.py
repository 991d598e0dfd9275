"""Cursors on LevelDB databases, and the library behind them: plyvel, or its successor plyvel-next.

Law: a LevelDB can be open in one process only. A second process gets an error that says what to do
instead; the cursors of a process share one handle. Without the library everything but LevelDB
works.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from poseidon.data.databases.handles import SharedHandles
from poseidon.data.databases.stepping import SteppingCursor
from poseidon.errors import DataError

LIBRARIES = ("plyvel_next", "plyvel")
"""Modules with one interface; the first that can be imported is used. setup.py names their
packages.
"""


def _library() -> ModuleType | None:
    for name in LIBRARIES:
        with suppress(ImportError):
            return import_module(name)
    return None


PLYVEL = _library()
ERRORS: tuple[type[Exception], ...] = (PLYVEL.Error,) if PLYVEL else ()
"""The exceptions of the library."""


class LevelDbMissingError(DataError):
    """The Python package for LevelDB is not installed."""


def require_leveldb() -> ModuleType:
    """Return the library.

    Raises:
        LevelDbMissingError: it is not installed. The text says how to install it and what works
            without it.
    """
    if PLYVEL is None:
        package = "plyvel-next" if sys.version_info >= (3, 12) else "plyvel-ci"
        raise LevelDbMissingError(
            f"LevelDB needs the Python package {package}, which is not installed: "
            f"use LMDB (--backend=lmdb), or pip install {package}"
        )
    return PLYVEL


ONE_OWNER = (
    "and a LevelDB can be open in one process only: give each client its own part (poseidon "
    "partition_data and shared_file_system: false), or use LMDB"
)
"""The end of the error for a second process."""

_DATABASES = SharedHandles()


def reason_of(error: Exception) -> str:
    """Return LevelDB's own message, which the library passes as bytes."""
    first = error.args[0] if error.args else error
    return first.decode(errors="backslashreplace") if isinstance(first, bytes) else str(first)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise DataError(
            f"the LevelDB database {path} cannot be read: {reason_of(error)}"
        ) from error


def _open(path: Path) -> Any:
    if not os.access(path, os.W_OK):
        raise DataError(
            f"the LevelDB database {path} is in a folder that is not writable, and LevelDB writes "
            "to its folder even for reading: copy it to a writable folder, or use LMDB"
        )
    plyvel = require_leveldb()
    try:
        return plyvel.DB(os.fsencode(path), create_if_missing=False)
    except plyvel.IOError as error:
        if "lock" not in reason_of(error).lower():
            raise
        raise DataError(
            f"the LevelDB database {path} is in use by another process, {ONE_OWNER}"
        ) from error


class LevelDbCursor(SteppingCursor):
    """A cursor on a LevelDB database. It knows the number of records after the first wrap or `len`.

    Args:
        path: a folder with a file CURRENT.

    Raises:
        DataError: the database is damaged, empty, in use by another process or in a read-only
            folder, or the library is not installed.
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
