"""Access by record number for databases that can only be stepped in key order.

Law: record numbers are unbounded. Record r of a database with n records is record r mod n, as
Caffe's cursor returns to the first record after the last. Stepping reads keys only, never values.

Reference-counted database handles, shared by all cursors of the process.

Law: a process opens a database at most once. LevelDB and LMDB both require it (their file locks
break when one of two handles closes), yet a train net and
a test net may read the same database. So the open handles are state of the process, as the locks
are. This is the only module state in the package.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        """Release a handle that `acquire` returned, and close it after the last release.
        Thread-safe.
        """
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
        path: the database, for error messages.
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
