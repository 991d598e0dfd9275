"""Signals at rank 0 of a rendezvous: to this process, or only to another task of the job.

A scheduler signals all tasks, or one. Rank 0's launcher stops in order at the first request and at
once at the second, so a signal to another task counts only if rank 0 itself got none.

Law: no handler is installed here; Python writes the number of each signal that has one into a pipe.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from types import TracebackType

LOGGER = logging.getLogger("poseidon.cluster.rendezvous")
WAIT_S = 3.0
_POLL_S = 0.05
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


class TaskSignals:
    """Watches the signals of this process. Entered in the main thread, while a job runs.

    Args:
        wait_s: how long this process's own signal may come after another task's.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._noted = threading.Event()
        self._closed = threading.Event()
        self._forwarder: threading.Thread | None = None

    def __enter__(self) -> TaskSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._noted.set()
        self._closed.set()
        if self._forwarder is not None:  # it reads the pipe
            self._forwarder.join()
        signal.set_wakeup_fd(self._before)
        os.close(self._read_end)
        os.close(self._write_end)

    def other_task_signalled(self, name: str) -> None:
        """Note that another task was asked to end. Returns at once; only the first call counts."""
        if not self._noted.is_set():
            self._noted.set()
            self._forwarder = threading.Thread(
                target=self._forward, name="poseidon asked to end", daemon=True
            )
            self._forwarder.start()

    def _forward(self) -> None:
        try:
            until_s = time.monotonic() + self._wait_s
            while time.monotonic() < until_s:
                if self._signalled():
                    return
                if self._closed.wait(_POLL_S):
                    return
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the request counts all the same
            LOGGER.warning("cannot tell whether this task was signalled, so it is: %r", error)
        os.kill(os.getpid(), signal.SIGTERM)

    def _signalled(self) -> bool:
        with suppress(OSError):
            return any(number in _ENDING for number in os.read(self._read_end, 4096))
        return False
