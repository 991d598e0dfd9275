"""The heartbeat of a worker: what it tells its launcher every two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch

from poseidon.engine.own_time import WAITED
from poseidon.exchange.device import used_memory
from poseidon.exchange.watchdog import Watchdog
from ps_server.link_load import sending_s

HEARTBEAT_S = 2.0


class HeartbeatSender:
    """Sends the `alive` event.

    Args:
        send: an event with fields to the launcher.

    Attributes:
        facts: of the work: `most_lead` once the exchange is built, and how far a script's loop has
            come.
        watchdog: watches the training loop.
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
