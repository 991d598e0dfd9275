"""Polling for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(found: Callable[[], bool], what: str, timeout_s: float, every_s: float = 0.005) -> None:
    """Poll until a condition holds.

    Raises:
        AssertionError: it was not in time; `what` says what was missing.
    """
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(every_s)
