"""Signals to this process: Ctrl-C while it imports, and whether it was asked to end itself, or only another task of the job.

An engine signals all tasks, or one. Rank 0's launcher stops in order at the first request and at once at the second, so
that what comes from another task counts only where rank 0 itself was not asked.

Law of `OwnSignals`: it installs no handler; Python writes the number of each signal that has one into a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

WAIT_S = 3.0
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


@contextmanager
def ctrl_c_ends_at_once(name: str) -> Iterator[None]:
    """While the block imports modules, Ctrl-C ends the process with a line and code 130.

    A KeyboardInterrupt would not do: numpy and others lose it, and fail later for a reason that names nothing. Nothing happens
    outside the main thread, or in a program with a handler of its own.

    Args:
        name: of the command, for the line.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, f"{name}: interrupted\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class OwnSignals:
    """Entered in the main thread, for as long as a job runs.

    Args:
        wait_s: how long our own signal may come after another task's.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._told = threading.Event()

    def __enter__(self) -> OwnSignals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._told.set()
        signal.set_wakeup_fd(self._before)
        os.close(self._read_end)
        os.close(self._write_end)

    def asked_elsewhere(self, name: str) -> None:
        """Another task was asked to end. Returns at once; only the first call counts."""
        if not self._told.is_set():
            self._told.set()
            threading.Thread(target=self._pass_on, name="poseidon asked to end", daemon=True).start()

    def _pass_on(self) -> None:
        until_s = time.monotonic() + self._wait_s
        while time.monotonic() < until_s:
            if self._asked_ourselves():
                return
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    def _asked_ourselves(self) -> bool:
        with suppress(OSError):
            return any(number in _ENDING for number in os.read(self._read_end, 4096))
        return False
