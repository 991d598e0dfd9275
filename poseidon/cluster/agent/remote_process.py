"""A process that an agent has started on its host, as the launcher sees it.

Law: it hears the agent's reports in order; after its end, or the loss of its agent, its listener hears nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from poseidon.cluster.agent.wire import (
    Begun,
    Ended,
    Order,
    Refused,
    Report,
    Send,
    Signal,
    SignalWord,
    Told,
    Wrote,
)
from poseidon.cluster.plan import ProcessName
from poseidon.cluster.process import Listener
from poseidon.errors import JobError, JobKilled, printable

CLOSE_S = 2.0
LOST_STATUS = 1


class FarProcess:
    """A process on another host: a `RunningProcess`."""

    def __init__(
        self, name: ProcessName, number: int, where: str, listener: Listener, order: Callable[[Order], None]
    ) -> None:
        self.id = number
        self._name = name
        self._where = where
        self._listener = listener
        self._order = order
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._ended = threading.Event()
        self._begun: Begun | None = None
        self._why_not: str | None = None
        self._unwanted = False
        self._status: int | None = None

    @property
    def name(self) -> ProcessName:
        """Who it is."""
        return self._name

    @property
    def pid(self) -> int:
        """Its process id on its own host."""
        return self._begun.pid if self._begun is not None else 0

    @property
    def created_s(self) -> float:
        """When it was created, by its host."""
        return self._begun.created_s if self._begun is not None else 0.0

    def await_start(self, timeout_s: float) -> None:
        """Wait for the news that it runs.

        Raises:
            JobError: it does not; a `JobKilled` where the user has killed the job there.
        """
        if not self._known.wait(timeout_s):
            raise JobError(f"{self._where}: {self._name.short} was not started within {timeout_s:g} s")
        if self._why_not is not None:
            error = JobKilled if self._unwanted else JobError
            raise error(f"{self._where}: {self._why_not}")

    def send_line(self, line: bytes) -> None:
        """See `RunningProcess`."""
        self._order(Send(id=self.id, line=line.decode()))

    def poll(self) -> int | None:
        """See `RunningProcess`."""
        return self._status

    def terminate(self) -> None:
        """See `RunningProcess`."""
        self._order(Signal(id=self.id, signal=SignalWord.TERMINATE))

    def kill(self) -> None:
        """See `RunningProcess`."""
        self._order(Signal(id=self.id, signal=SignalWord.KILL))

    def close(self) -> None:
        """See `RunningProcess`."""
        if self._status is None and self._begun is not None:
            self.kill()
            self._ended.wait(CLOSE_S)

    def hear(self, report: Report) -> None:
        """Take what the agent reports of it."""
        if isinstance(report, Begun):
            self._begun = report
            self._known.set()
        elif isinstance(report, Refused):
            self._why_not = printable(report.message)
            self._known.set()
        elif isinstance(report, Told) and self._status is None:
            self._listener.event(self._name, report.event)
        elif isinstance(report, Wrote) and self._status is None:
            self._listener.log(self._name, report.line)
        elif isinstance(report, Ended):
            self._end(report.status)

    def lose(self, why: str, *, unwanted: bool = False) -> None:
        """Its agent cannot be reached any more; `unwanted`: since the user has killed the job there."""
        if self._begun is None:
            self._why_not, self._unwanted = why, unwanted
            self._known.set()
        elif self._status is None:
            message = f"{self._where}: {why}; the job was stopped"
            told = {
                "event": "error",
                "message": message,
                "exit_code": 1,
                "host_lost": True,
                "unwanted": unwanted,
            }
            self._listener.event(self._name, told)
            self._end(LOST_STATUS)

    def _end(self, status: int) -> None:
        with self._lock:
            if self._status is not None:
                return
            self._status = status
        self._ended.set()
        self._listener.exited(self._name, status)
