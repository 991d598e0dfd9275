"""Background writing of snapshots: training continues while files are serialized, checksummed and
written to disk.

Law: one write at a time, in the order of submission. A submission waits for the write before it, so
at most one copy of the weights waits in memory. A write that fails is a warning in the log, since
the next one may succeed; `wait` raises the failure of the last one, and the warning of that one
says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import SnapshotError

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSnapshot:
    """A snapshot that is complete on disk.

    Attributes:
        state: the `.solverstate`, or a script's checkpoint.
        seconds: duration of serializing and writing.
    """

    state: Path
    iteration: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How snapshots are kept and reported.

    Attributes:
        keep: how many snapshots of this run stay on disk, the newest; 0: all.
        on_written: called with each complete snapshot, from the thread that wrote it.
        on_wait: called every second while the loop waits for the disk.
        stop_at_nan: weights that are not finite raise an error; otherwise they are a warning. They
            are never written.
        spare: the folder for the weights of a run's last snapshot, if it cannot be written where it
            belongs; None: there is none.
    """

    keep: int = 0
    on_written: Callable[[WrittenSnapshot], None] = lambda written: None
    on_wait: Callable[[], None] = lambda: None
    stop_at_nan: bool = True
    spare: Path | None = None


class SnapshotWriter:
    """A thread that runs one write at a time.

    Args:
        on_wait: called every second while `submit` or `wait` waits.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self._on_wait = on_wait
        self._thread: threading.Thread | None = None
        self._error: SnapshotError | None = None

    def submit(self, write: Callable[[], None], *, last: bool = False) -> None:
        """Start a write, once the write before it has ended.

        Args:
            write: may raise SnapshotError, and nothing else.
            last: no write comes after it, so its failure ends the job.
        """
        self._join()
        # No daemon: a process that ends by itself ends after its snapshot is complete.
        self._thread = threading.Thread(
            target=self._run, args=(write, last), name="poseidon-snapshot"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until all writes have ended.

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

    def _run(self, write: Callable[[], None], last: bool) -> None:
        self._error = None
        try:
            write()
        except SnapshotError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: its owner raises it
            self._error = SnapshotError(
                f"the snapshot could not be written: {type(error).__name__}: {error}"
            )
        if self._error is not None:
            effect = "it is the run's last, so the job fails" if last else "training continues"
            LOGGER.warning("%s; %s, and earlier snapshots are as they were", self._error, effect)
