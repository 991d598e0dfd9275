"""The backends, detection of the backend of a database folder, and access by record number.

Law: a backend is recognized by the files in the folder, before any library opens it (LevelDB
creates files even when it fails). A wrong `backend:` in a definition, a missing folder and a folder
of a different kind are different errors.

Access by record number for databases that can only be stepped in key order.

Law: record numbers are unbounded. Record r of a database with n records is record r mod n, as
Caffe's cursor returns to the first record after the last. Stepping reads keys only, never values.

Reference-counted database handles, shared by all cursors of the process.

Law: a process opens a database at most once. LevelDB and LMDB both require it (their file locks
break when one of two handles closes), yet a train net and
a test net may read the same database. So the open handles are state of the process, as the locks
are. This is the only module state in the package.
"""

from __future__ import annotations

import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

from poseidon.base.paths import own_command
from poseidon.errors import DataError, UsageError

IN_README = "the README.md of a folder of `poseidon init` has the command"
"""For an error about data that do not exist yet."""


class Backend(IntEnum):
    """A kind of database, with its number in Caffe's `DataParameter.DB`."""

    LEVELDB = 0
    """A folder that one process at a time can open."""
    LMDB = 1
    """A memory-mapped file that any number of processes can read at the same time."""

    @property
    def title(self) -> str:
        """The name as its project spells it."""
        return "LevelDB" if self is Backend.LEVELDB else "LMDB"

    @property
    def suffix(self) -> str:
        """The suffix of such folders in Caffe's examples: `lmdb` or `leveldb`."""
        return self.name.lower()

    @staticmethod
    def parse(name: str) -> Backend:
        """Return the backend `lmdb` or `leveldb`, in any case; UsageError for another name."""
        try:
            return Backend[name.upper()]
        except KeyError:
            raise UsageError(f"unknown backend '{name}': expected lmdb or leveldb") from None


def detect(path: Path) -> Backend | None:
    """Return the kind of database in the folder `path`, or None if it is not a database."""
    if (path / "data.mdb").is_file():
        return Backend.LMDB
    if (path / "CURRENT").is_file():
        return Backend.LEVELDB
    return None


def _maker(name: str) -> str:
    """Return the command that makes a database of this name, by the names of Caffe's examples."""
    makers = {
        "siamese": "convert_mnist_siamese",
        "mnist": "convert_mnist",
        "cifar": "prepare_cifar10",
    }
    known = next((maker for part, maker in makers.items() if part in name), None)
    if known is not None:
        return f"{own_command()} {known} ({IN_README})"
    return (
        f"{own_command()} make_db --format=caffe FOLDER {shlex.quote(name)}, of a folder with a "
        "sub-folder of pictures for each class, with convert_imageset, of a list, or with "
        f"convert_annoset, of a list with objects; for a net of the zoo {IN_README}"
    )


def require(path: Path) -> Backend:
    """Return the kind of database in the folder `path`.

    Raises:
        DataError: the folder does not exist or is not a database.
    """
    if not path.exists():
        raise DataError(
            f"the database {path} does not exist: create it first with {_maker(path.name)}"
        )
    found = detect(path)
    if found is None:
        raise DataError(
            f"{path} is not a database: expected a folder with data.mdb (LMDB) or CURRENT "
            "(LevelDB) in it"
        )
    return found


def require_kind(path: Path, backend: Backend, *, by_flag: bool = False) -> None:
    """Check that the folder `path` holds a database of the kind `backend`.

    Args:
        backend: what a layer names, or a flag.

    Raises:
        DataError: the folder does not exist, is not a database, or is of the other kind.
    """
    found = require(path)
    if found is not backend:
        named = f"--backend={found.suffix}" if by_flag else f"backend: {found.name}"
        raise DataError(
            f"the database {path} is {found.title}, but was named as {backend.title}: write {named}"
        )


class SharedHandles:
    """Handles by resolved path, each open while its reference count is positive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[Any, int]] = {}

    def acquire(self, path: Path, open_handle: Callable[[], Any]) -> Any:
        """Return the handle of `path`, opened by `open_handle` if it is not open. Thread-safe."""
        key = path.resolve()
        with self._lock:
            if key in self._open:
                handle, holders = self._open[key]
            else:
                handle, holders = open_handle(), 0
            self._open[key] = (handle, holders + 1)
            return handle

    def release(self, path: Path) -> None:
        """Release a handle of `acquire`, and close it after the last release. Thread-safe."""
        key = path.resolve()
        with self._lock:
            handle, holders = self._open.pop(key)
            if holders > 1:
                self._open[key] = (handle, holders - 1)
            else:
                handle.close()


class SteppingCursor(ABC):
    """A cursor on a database with at least one record, initially on the first.

    Args:
        length: the number of records, or None if it is expensive to compute; then it is known after
            the first wrap.
    """

    def __init__(self, path: Path, length: int | None) -> None:
        self.path = path
        self._length = length
        self._position = 0

    def __len__(self) -> int:
        if self._length is None:
            self._length = self._count()
        return self._length

    @property
    def position(self) -> int:
        """The number of the current record, 0 <= position < len."""
        return self._position

    def seek(self, record: int) -> None:
        """Move to record number `record` >= 0, modulo the number of records."""
        if self._length is not None:
            record %= self._length
        if record < self._position:
            self._rewind()
        while self._position < record:
            wanted = record - self._position
            made = self._advance(wanted)
            self._position += made
            if made < wanted:
                self._length = self._position + 1
                self._rewind()
                record %= self._length

    def skip(self, count: int) -> None:
        """Move forward by `count` >= 0 records, from the last to the first."""
        self.seek(self._position + count)

    def _rewind(self) -> None:
        self._first()
        self._position = 0

    @abstractmethod
    def _first(self) -> None:
        """Move to the first record."""

    @abstractmethod
    def _advance(self, count: int) -> int:
        """Move forward by up to `count` records and return the number of steps made.

        Fewer than `count` steps mean that the last record was reached; the cursor's position is
        then undefined.
        """

    @abstractmethod
    def _count(self) -> int:
        """Count the records without moving the cursor."""
