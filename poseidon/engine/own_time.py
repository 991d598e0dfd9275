"""The time that a worker takes for its iterations without waits for other workers, and the time for
which it waits for data.

The launcher divides the virtual workers by the first (`--balance=auto`) and shows the second beside
the other waits.

Law: measuring changes no bit. It reads a clock twice in an iteration, and sends an event a few times a
second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from poseidon.exchange.device import device_of

REPORT_S = 0.25


class OwnTime:
    """Measures the iterations of one worker, for one start of its job.

    Args:
        waited_s: returns the seconds that the loop has waited for other workers so far.
        now_s: seconds, monotonic.
    """

    def __init__(
        self,
        send: Callable[..., None],
        waited_s: Callable[[], float],
        device: torch.device,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._send = send
        self._waited_s = waited_s
        self._device = device
        self._now_s = now_s
        self._began: tuple[float, float] | None = None
        self._last: tuple[float, float] | None = None
        """The own time and the whole time of the iteration that has ended last."""
        self._iterations = 0
        self._own_s = self._whole_s = 0.0
        self._next_s = 0.0

    def begin(self) -> None:
        """Note that an iteration begins. The one that has ended before counts from here on, and is
        reported when the last report is long enough ago.

        The last of several calls in a row counts.
        """
        now_s = self._now_s()
        if self._last is not None:
            own_s, whole_s = self._last
            self._iterations, self._last = self._iterations + 1, None
            self._own_s, self._whole_s = self._own_s + own_s, self._whole_s + whole_s
            if now_s >= self._next_s:
                self._next_s = now_s + REPORT_S
                self._report()
        self._began = now_s, self._waited_s()

    def end(self) -> None:
        """Note that it has ended. The last of several calls in a row counts."""
        if self._began is None:
            return
        device_of(self._device).synchronize()
        began_s, waited_s = self._began
        whole_s = self._now_s() - began_s
        self._last = max(0.0, whole_s - (self._waited_s() - waited_s)), whole_s

    def _report(self) -> None:
        self._send(
            "timed",
            iterations=self._iterations,
            own_s=round(self._own_s, 6),
            whole_s=round(self._whole_s, 6),
        )


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
