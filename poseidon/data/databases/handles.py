"""Open databases of this process, shared by all its cursors.

Law: a database is opened at most once in a process. LevelDB and LMDB both demand it (LevelDB's lock refuses
a second owner; LMDB's file locks break when one of two handles closes), yet a train net and a test net may
well read the same database. So the set of open handles belongs to the process, as the locks do: this is the
one piece of module state in the room, counted up and down under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Handle = TypeVar("Handle")


class SharedHandles(Generic[Handle]):
    """Handles by resolved path, each open while somebody holds it.

    Args:
        close: called with a handle that its last holder has released.
    """

    def __init__(self, close: Callable[[Handle], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[Handle, int]] = {}

    def acquire(self, path: Path, open_handle: Callable[[], Handle]) -> Handle:
        """Return the handle of `path`, opened by `open_handle` if nobody holds it yet. Thread-safe."""
        key = path.resolve()
        with self._lock:
            if key in self._open:
                handle, holders = self._open[key]
            else:
                handle, holders = open_handle(), 0
            self._open[key] = (handle, holders + 1)
            return handle

    def release(self, path: Path) -> None:
        """Give back what `acquire` gave. Thread-safe."""
        key = path.resolve()
        with self._lock:
            handle, holders = self._open.pop(key)
            if holders > 1:
                self._open[key] = (handle, holders - 1)
            else:
                self._close(handle)
