"""Ctrl-C as a request: a command finishes its current step, prints its results so far, and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Return, within the block, whether Ctrl-C was pressed; a second Ctrl-C raises
    KeyboardInterrupt.

    Outside the main thread, or in a program with a handler of its own, nothing changes.
    """
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield pressed.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
