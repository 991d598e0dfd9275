"""The agent's end of the channel to its launcher.

Law: no queue grows without a bound, and nothing waits for a channel that is lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.messages import REPORTS
from poseidon.cluster.dial.channel import Channel

HEARTBEAT_S = 2.0
TICK_S = 0.2
MAX_QUEUED = 10_000


class LauncherChannel:
    """The channel to the launcher, with a bounded queue each way.

    Args:
        channel: closed at the end.
        greeted: returns whether the launcher may be sent heartbeats.
    """

    def __init__(self, channel: Channel, greeted: Callable[[], bool]) -> None:
        self._channel = channel
        self._greeted = greeted
        self.inbox: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._outbox: queue.Queue[m.Report | None] = queue.Queue(MAX_QUEUED)
        self.lost = threading.Event()
        self.why_lost = ""

    def report(self, report: m.Report, timeout_s: float) -> bool:
        """See `Agent.report`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.lost.is_set() and time.monotonic() < deadline_s:
            with suppress(queue.Full):
                self._outbox.put(report, timeout=TICK_S)
                return True
        return False

    def receive(self) -> None:
        """Put in the inbox what comes, until the end."""
        while not self.lost.is_set():
            try:
                encoded = self._channel.receive()
            except OSError as error:
                self.why_lost = str(error)
                self.lost.set()
                return
            while not self.lost.is_set():
                with suppress(queue.Full):
                    self.inbox.put(encoded, timeout=TICK_S)
                    break
            if encoded is None:
                return

    def send(self) -> None:
        """Send reports, and heartbeats, until `end`."""
        while not self.lost.is_set():
            try:
                report = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                if not self._greeted():
                    continue
                report = m.Heartbeat()
            if report is None:
                return
            try:
                self._channel.send(REPORTS.encode(report))
            except OSError:
                self.lost.set()

    def end(self, sender: threading.Thread) -> None:
        """Send the last reports, and close the channel."""
        with suppress(queue.Full):  # a channel that takes nothing is lost
            self._outbox.put_nowait(None)
        sender.join(HEARTBEAT_S)
        self.lost.set()
        self._channel.close()
