"""Waits that end: of operators that wait for other threads.

A wait ends where its condition holds, after its limit, and with an error where the plan around it
ends, because another part of it has failed, or where the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

SLICE_S = 0.1
"""How often a wait looks whether its plan has ended."""

Stop = Callable[[], bool]


class Cancelled(RuntimeError):
    """A wait of an operator has ended because the plan around it has ended."""


def is_cancelled(error: BaseException | None) -> bool:
    """Return whether an error is, or was caused by, a wait that was cancelled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, Cancelled):
            return True
        seen.add(id(error))  # an error can be its own cause
        error = error.__cause__
    return False


Lend = Callable[[], AbstractContextManager[None]]


class _Thread(threading.local):
    stopped: Stop | None = None
    lend: Lend = nullcontext


_thread = _Thread()


def current_stop() -> Stop | None:
    """Return the function that tells whether the plan of this thread has ended; None outside
    plans.
    """
    return _thread.stopped


@contextmanager
def cancellable(stopped: Stop | None) -> Iterator[None]:
    """End the waits of this thread, in this block, where a function returns true."""
    before, _thread.stopped = _thread.stopped, stopped
    try:
        yield
    finally:
        _thread.stopped = before


def lending() -> AbstractContextManager[None]:
    """Let another operator of this thread's net run while this one waits, in a block."""
    return _thread.lend()


@contextmanager
def lent_by(lend: Lend) -> Iterator[None]:
    """Set what `lending` returns on this thread, in this block."""
    before, _thread.lend = _thread.lend, lend
    try:
        yield
    finally:
        _thread.lend = before


def wait_for(
    condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None = None
) -> bool:
    """Wait until a function returns true; return whether it does.

    Args:
        condition: it is held, and notified where the function's result may have changed.
        ready: the function.
        timeout_s: the limit, None for no limit.

    Raises:
        Cancelled: the plan of this thread, or the process, ends.
    """
    if ready():
        return True
    with lending():
        return _wait(condition, ready, timeout_s)


def _wait(
    condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None
) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not ready():
        left = SLICE_S if deadline is None else min(SLICE_S, deadline - time.monotonic())
        if left <= 0:
            return False
        condition.wait(left)
        stopped = _thread.stopped
        if (stopped is not None and stopped()) or getattr(threading, "_SHUTTING_DOWN", False):
            if ready():
                return True
            raise Cancelled(
                "The wait of an operator has ended: another part of its plan has failed or ended"
            )
    return True
