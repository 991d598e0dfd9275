"""Polling for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(found: Callable[[], bool], what: str, timeout_s: float, every_s: float = 0.005) -> None:
    """Poll until a condition holds; at most a tenth of the time goes into the question.

    Raises:
        AssertionError: it was not in time; `what` says what was missing.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if found():
            return
        now = time.monotonic()
        assert now < deadline, what
        time.sleep(min(max(every_s, 9 * (now - asked)), 0.5))
