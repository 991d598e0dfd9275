"""Signals at rank 0 of a rendezvous: to this process, or only to another task of the job.

A scheduler signals all tasks, or some. Rank 0's launcher stops in order at the first request and at
once at the second, so a signal to another task counts only if rank 0 itself got none. Then its host
leaves the job, or the job is stopped if it cannot.

Law: no handler is installed here; Python writes the number of each signal that has one into a pipe.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOGGER = logging.getLogger("poseidon.cluster.rendezvous")
WAIT_S = 3.0
"""How long this process's own signal may come after another task's."""
_POLL_S = 0.05
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


class TaskSignals:
    """Watches the signals of this process. Entered in the main thread, while a job runs."""

    def __init__(self) -> None:
        self._others: queue.SimpleQueue[tuple[float, Callable[[], bool]] | None]
        self._others = queue.SimpleQueue()
        """Other tasks that were asked to end: until when this process's own signal may come, and
        what lets the task's host leave the job."""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._decide, name="poseidon asked to end", daemon=True
        )

    def __enter__(self) -> TaskSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._others.put(None)
        self._thread.join()  # it reads the pipe
        signal.set_wakeup_fd(self._before)
        os.close(self._read_end)
        os.close(self._write_end)

    def other_task_signalled(self, leave: Callable[[], bool]) -> None:
        """Note that another task was asked to end. Returns at once; any thread may call it.

        Args:
            leave: lets the host of the task leave the job; returns False if it cannot.
        """
        self._others.put((time.monotonic() + WAIT_S, leave))

    def _decide(self) -> None:
        try:
            while (other := self._others.get()) is not None:
                until_s, leave = other
                if self._signalled_before(until_s):
                    return
                if not leave():
                    break
            else:
                return
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the request counts all the same
            LOGGER.warning(
                "cannot tell whether only this task was signalled, so it ends: %r", error
            )
        os.kill(os.getpid(), signal.SIGTERM)

    def _signalled_before(self, until_s: float) -> bool:
        """Wait; return True as soon as this process was signalled itself, or the job has ended."""
        while time.monotonic() < until_s:
            if self._signalled() or self._closed.wait(_POLL_S):
                return True
        return False

    def _signalled(self) -> bool:
        with suppress(OSError):
            return any(number in _ENDING for number in os.read(self._read_end, 4096))
        return False
