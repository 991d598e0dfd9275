"""Writing in the background: training goes on while a snapshot is serialized, checksummed and brought to disk.

Law: one write at a time, in the order of submission; whoever submits the next waits for the one before, so no more than
one copy of the weights waits in memory. A write that fails is a warning in the log, since the next one may succeed; the
failure of the last one is an error of whoever waits for the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from poseidon.errors import SnapshotError

LOGGER = logging.getLogger(__name__)


class BackgroundWriter:
    """One thread that writes what it is given.

    Args:
        on_wait: called every second while `submit` or `wait` waits.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self._on_wait = on_wait
        self._thread: threading.Thread | None = None
        self._error: SnapshotError | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Start to write; waits for the write before.

        Args:
            write: what to do; may raise SnapshotError, and nothing else.
        """
        self._join()
        # No daemon: a process that ends by itself ends after its snapshot is whole.
        self._thread = threading.Thread(target=self._run, args=(write,), name="poseidon-snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            SnapshotError: the last write has failed.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        while self._thread is not None:
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self._thread = None
            self._on_wait()

    def _run(self, write: Callable[[], None]) -> None:
        self._error = None
        try:
            write()
        except SnapshotError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: its owner hears it
            self._error = SnapshotError(f"the snapshot could not be written: {type(error).__name__}: {error}")
        if self._error is not None:
            LOGGER.warning("%s; training goes on, and earlier snapshots are as they were", self._error)
