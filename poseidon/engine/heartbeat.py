"""The heartbeat of a worker: what it tells its launcher every two seconds. Its watchdog knows whether
the loop makes progress, waits for other workers, or hangs.

The loop reports progress at every tensor and every batch, which costs a look at a clock. The thread
that sends heartbeats reads the watchdog. A loop that waits for other workers does not hang: the
worker that it waits for may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from poseidon.engine.own_time import WAITED
from poseidon.exchange.device import used_memory
from poseidon.exchange.observer import ObservedCall, Observer
from ps_server.statistics import sending_s

HEARTBEAT_S = 2.0


class HeartbeatSender:
    """Sends the `alive` event.

    Args:
        send: an event with fields to the launcher.

    Attributes:
        facts: of the work: `most_lead` once the exchange is built, and how far a script's loop has
            come.
        device: where this worker computes.
    """

    def __init__(self, send: Callable[..., None], watchdog: Watchdog | None = None) -> None:
        self._send = send
        self._closed = threading.Event()
        self.facts: dict[str, object] = {}
        self.watchdog = watchdog or Watchdog()
        self.device = torch.device("cpu")

    def run(self, is_wanted: Callable[[], bool]) -> None:
        """Send one every two seconds while it is wanted, until `close`."""
        while not self._closed.wait(HEARTBEAT_S):
            if is_wanted():
                self.beat()

    def beat(self) -> None:
        """Send one."""
        reading = self.watchdog.read()
        self._send(
            "alive",
            still_s=round(reading.still_s, 1),
            waited_s=round(reading.waited_s, 3),
            read_s=round(WAITED.waited_s, 3),
            sending_s=sending_s(),
            host_busy=psutil.cpu_percent() / 100,
            **({"gpu": gpu} if (gpu := gpu_reading(self.device)) else {}),
            **self.facts,
        )

    def close(self) -> None:
        self._closed.set()


def gpu_reading(device: torch.device) -> dict[str, float]:
    """Return the memory in use on a GPU by all processes and the whole memory, in bytes; with the
    extra `gpu` (nvidia-ml-py) also the busy part of the time, 0..1, and the temperature in degrees
    Celsius. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    found: dict[str, float] = {}
    with suppress(RuntimeError):
        used, total = used_memory(device)
        found |= {"memory_bytes": used, "total_bytes": total}
    # no nvidia-ml-py, or a driver, or a MIG instance, that does not say it
    with suppress(Exception):
        found["busy"] = torch.cuda.utilization(device) / 100
    with suppress(Exception):
        found["temperature_c"] = torch.cuda.temperature(device)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a watchdog shows.

    Attributes:
        still_s: seconds since the loop last made progress; 0 while it waits for other workers.
        waited_s: seconds spent in such waits so far.
    """

    still_s: float
    waited_s: float


class Watchdog(Observer):
    """Watches one loop. Until `start` it reads as if the loop had just made progress.

    As an observer of the loop's exchange it takes a gradient that begins as progress, and every
    other call as a wait.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._progress_s: float | None = None
        self._waiting_since_s: float | None = None
        self._depth = 0
        self._waited_s = 0.0

    def start(self) -> None:
        """Begin to watch: from now on a loop that makes no progress hangs."""
        self._progress_s = self._now()

    def stop(self) -> None:
        """Stop watching: the loop has ended."""
        self._progress_s = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch inside the block: the loop stands still on purpose."""
        is_watched, self._progress_s = self._progress_s is not None, None
        try:
            yield
        finally:
            if is_watched:
                self.start()

    def progress(self) -> None:
        """Note that the loop makes progress."""
        if self._progress_s is not None:
            self._progress_s = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the loop waits for other workers. It may be entered within itself."""
        self._begin_wait()
        try:
            yield
        finally:
            self._end_wait()

    def before(self, call: ObservedCall, index: int) -> None:
        if call is ObservedCall.BEGIN:
            self.progress()
        else:
            self._begin_wait()

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        if call is not ObservedCall.BEGIN:
            self._end_wait()

    def _begin_wait(self) -> None:
        if self._depth == 0:
            self._waiting_since_s = self._now()
        self._depth += 1

    def _end_wait(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        now = self._now()
        assert self._waiting_since_s is not None
        self._waited_s += now - self._waiting_since_s
        self._waiting_since_s = None
        if self._progress_s is not None:
            self._progress_s = now

    def read(self) -> Reading:
        """Return what it shows now. Any thread may call this."""
        progress_s, since_s = self._progress_s, self._waiting_since_s
        still_s = 0.0
        if progress_s is not None and since_s is None:
            still_s = max(0.0, self._now() - progress_s)
        waited_s = self._waited_s + (self._now() - since_s if since_s is not None else 0.0)
        return Reading(still_s=still_s, waited_s=waited_s)
