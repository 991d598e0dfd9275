"""A listener that records the events of a process, in order."""

from __future__ import annotations

import queue
from collections.abc import Mapping

from poseidon.base.text_files import LineAssembler
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.process import OutputStream

WAIT_S = 30.0


class RecordingListener:
    """Records the events of one process: ("ready", event), ("log", line), ("exited", status).

    Attributes:
        pieces: of its output, as they came.
    """

    def __init__(self) -> None:
        self.received: queue.Queue[tuple[str, object]] = queue.Queue()
        self.pieces: queue.Queue[tuple[OutputStream, str]] = queue.Queue()
        self._lines = {stream: LineAssembler() for stream in OutputStream}

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self.received.put((str(event["event"]), event))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self.pieces.put((stream, text))
        for line in self._lines[stream].feed(text):
            self.received.put(("log", line.text))

    def exited(self, name: ProcessName, status: int) -> None:
        for lines in self._lines.values():
            for line in lines.finish():
                self.received.put(("log", line.text))
        self.received.put(("exited", status))

    def until(self, kind: str, limit_s: float = WAIT_S) -> list[tuple[str, object]]:
        """Wait for the first event of a kind. Return all events up to it."""
        found = []
        while not found or found[-1][0] != kind:
            found.append(self.received.get(timeout=limit_s))
        return found


class FailingListener(RecordingListener):
    """Cannot take a line of text."""

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        raise RuntimeError("no room for a line")
