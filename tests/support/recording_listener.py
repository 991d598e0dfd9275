"""A listener that records the events of a process, in order."""

from __future__ import annotations

import queue
from collections.abc import Mapping

from poseidon.cluster.plan import ProcessName

WAIT_S = 30.0


class RecordingListener:
    """Records the events of one process: ("ready", event), ("log", line), ("exited", status)."""

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[str, object]] = queue.Queue()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.received.put((str(event["event"]), event))

    def log(self, name: ProcessName, line: str) -> None:
        self.received.put(("log", line))

    def exited(self, name: ProcessName, status: int) -> None:
        self.received.put(("exited", status))

    def until(self, kind: str, limit_s: float = WAIT_S) -> list[tuple[str, object]]:
        """Wait for the first event of a kind. Return all events up to it."""
        found = []
        while not found or found[-1][0] != kind:
            found.append(self.received.get(timeout=limit_s))
        return found
