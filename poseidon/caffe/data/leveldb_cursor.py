"""Cursors on LevelDB databases, and the library behind them: plyvel, or its successor plyvel-next.

Law: LevelDB's library opens a folder in one process only. Here a process opens a folder of its own,
with links to the files, which the library never changes; so any number of processes read one
database, also from a folder that is not writable. Each shares the lock that a writer needs alone:
who writes is refused while it is read, and who reads while it is written. The cursors of a process
share one handle. Without the library everything but LevelDB works.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, cast

from poseidon.caffe.data.databases import SharedHandles, SteppingCursor
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


OF_THE_LIBRARY = ("LOCK", "LOG", "LOG.old")
"""The files of a database that each process has to itself."""

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
    except OSError as error:
        raise DataError(f"the LevelDB database {path} cannot be read: {error.strerror}") from error


class _Readable:
    """A database that this process reads, and others may."""

    def __init__(self, path: Path) -> None:
        plyvel = require_leveldb()
        with ExitStack() as stack:
            _share_lock(path, stack)
            folder = stack.enter_context(TemporaryDirectory(prefix="poseidon-leveldb-"))
            with os.scandir(path) as entries:
                for entry in entries:
                    place = os.path.join(folder, entry.name)
                    if entry.name in OF_THE_LIBRARY:
                        continue
                    if not entry.is_symlink():
                        os.symlink(os.path.abspath(entry.path), place)
                    elif entry.is_file():  # LevelDB may write to it, and it may lead to any file
                        shutil.copyfile(entry.path, place)
            database = plyvel.DB(folder, create_if_missing=False)
            stack.callback(database.close)
            self.raw_iterator = database.raw_iterator
            # also at the end of the process, before the folder is removed
            self.close = weakref.finalize(self, stack.pop_all().close)


def _share_lock(path: Path, stack: ExitStack) -> None:
    """Hold the lock of a database together with other readers, to the end of the stack.

    A copy in a folder that is not writable may lack the file; then nobody can write there.

    Raises:
        DataError: a process writes to the database.
    """
    try:
        descriptor = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path / "LOCK", flags, 0o644)
        except OSError:
            return
    stack.callback(os.close, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise DataError(
            f"a process writes to the LevelDB database {path}; wait until it has ended"
        ) from error


class LevelDbCursor(SteppingCursor):
    """A cursor on a LevelDB database. It knows the number of records after the first wrap or `len`.

    Args:
        path: a folder with a file CURRENT.

    Raises:
        DataError: the database is damaged or empty, a process writes to it, or the library is not
            installed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, None)
        self._closed = True
        with _translated(path):
            self._database = _DATABASES.acquire(path, lambda: _Readable(path))
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
