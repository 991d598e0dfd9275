"""Reference-counted database handles, shared by all cursors of the process.

Law: a process opens a database at most once. LevelDB and LMDB both require it (their file locks
break when one of two handles closes), yet a train net and
a test net may read the same database. So the open handles are state of the process, as the locks
are. This is the only module state in the package.
"""

from __future__ import annotations

import threading
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
