"""Watchdogs: the process ends, with all threads' stacks, when a call takes too long."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("timeout_guard")

ABORT_S = 10.0
"""From the interrupt to the abort, for a process that does not end."""


def _end_process(reason: str) -> None:
    """Report where all threads are, interrupt the process, and abort it where that does not help.

    A process that ignores SIGINT, as one that a shell began in the background, is aborted at once.
    """
    log.error("%s PID: %d", reason, os.getpid())
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        os.abort()
    abort = threading.Timer(ABORT_S, os.abort)
    abort.daemon = True
    abort.start()
    # To the main thread: in any other, the signal would not wake it from a wait.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def CompleteInTimeOrDie(timeout_secs: float) -> Iterator[None]:
    """End the process when the block takes longer: KeyboardInterrupt, SIGABRT after ten seconds.

    Args:
        timeout_secs: the longest time.
    """
    reason = f"Call did not finish in time. Timeout:{timeout_secs}s"
    watchdog = threading.Timer(timeout_secs, _end_process, (reason,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def EuthanizeIfNecessary(timeout_secs: float = 120) -> None:
    """End the process if it still runs after a time: for scripts whose threads may hang.

    Args:
        timeout_secs: the time.
    """
    reason = f"The process did not end in time. Timeout:{timeout_secs}s"
    watchdog = threading.Timer(timeout_secs, _end_process, (reason,))
    watchdog.daemon = True
    watchdog.start()
