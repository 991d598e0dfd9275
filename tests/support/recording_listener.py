"""A listener that remembers what a process said, in order."""

from __future__ import annotations

import queue
from collections.abc import Mapping

from poseidon.cluster.plan import ProcessName

WAIT_S = 30.0


class RecordingListener:
    """Hears one process: ("ready", event), ("log", line), ("exited", status)."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[str, object]] = queue.Queue()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.heard.put((str(event["event"]), event))

    def log(self, name: ProcessName, line: str) -> None:
        self.heard.put(("log", line))

    def exited(self, name: ProcessName, status: int) -> None:
        self.heard.put(("exited", status))

    def until(self, kind: str, limit_s: float = WAIT_S) -> list[tuple[str, object]]:
        """Everything up to and with the first of a kind."""
        heard = []
        while not heard or heard[-1][0] != kind:
            heard.append(self.heard.get(timeout=limit_s))
        return heard
