"""The time for which a process waits for data, which the launcher shows beside its other waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WaitClock:
    """The time for which this process has waited for data. Any thread may use it."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._lock = threading.Lock()

    @property
    def waited_s(self) -> float:
        """Seconds since the start, without a wait that still lasts."""
        return self._waited_s

    @contextmanager
    def measure(self, *, needed: bool) -> Iterator[None]:
        """Count the time of the block, if it is needed."""
        if not needed:
            yield
            return
        began_s = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waited_s += time.monotonic() - began_s


WAITED = WaitClock()
"""The waits of all readers of this process."""
