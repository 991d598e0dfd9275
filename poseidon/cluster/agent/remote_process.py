"""A process that an agent has started on its host, as the launcher sees it.

Law: it takes the agent's reports in order; after its exit, or the loss of its agent, it calls its
listener no more. A process that has paused continues under another name and with another listener,
which is called for its exit whenever that was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from poseidon.cluster.agent import messages as m
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.process import Listener
from poseidon.errors import JobError, JobKilled, printable

CLOSE_S = 2.0
START_S = 60.0
LOST_STATUS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why an agent is lost.

    Attributes:
        why: the end of a sentence.
        killed_by_user: the user has killed the job there.
        refused: the agent has said itself why it cannot serve.
    """

    why: str
    killed_by_user: bool = False
    refused: bool = False

    def __str__(self) -> str:
        return self.why


class RemoteProcess:
    """A process on another host.

    Args:
        name: which process.
        number: its id on the wire.
        label: the host in messages.
        listener: notified of events, output and the exit.
        send: queues a request to the agent.
    """

    def __init__(
        self,
        name: ProcessName,
        number: int,
        label: str,
        listener: Listener,
        send: Callable[[m.Request], None],
    ) -> None:
        self.id = number
        self.name = name
        self._label = label
        self._listener = listener
        self._send = send
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._ended = threading.Event()
        self._started: m.Started | None = None
        self._refusal: str | None = None
        self._killed_by_user = False
        self._status: int | None = None

    @property
    def pid(self) -> int:
        return self._started.pid if self._started is not None else 0

    @property
    def created(self) -> str:
        return self._started.created if self._started is not None else ""

    def attach(self, name: ProcessName, listener: Listener) -> None:
        """Let the process have another name from here on, and notify another listener."""
        with self._lock:
            self.name, self._listener = name, listener
            status = self._status
        if status is not None:
            listener.exited(name, status)

    def await_start(self) -> None:
        """Wait until the agent has started it.

        Raises:
            JobError: it was not started; `JobKilled` where the user has killed the job there.
        """
        if not self._answered.wait(START_S):
            raise JobError(f"{self._label}: {self.name.short} was not started within {START_S:g} s")
        if self._refusal is not None:
            error = JobKilled if self._killed_by_user else JobError
            raise error(f"{self._label}: {self._refusal}")

    def send_line(self, line: bytes) -> None:
        """Queue one line for its standard input. Returns at once; dropped when it has ended."""
        self._send(m.WriteLine(id=self.id, line=line))

    def poll(self) -> int | None:
        """Return its exit status as `Listener.exited` gets it, or None while it runs."""
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM, also if it is stopped. Nothing happens when it has ended."""
        self._send(m.SendSignal(id=self.id, signal=m.ProcessSignal.TERMINATE))

    def kill(self) -> None:
        """Send SIGKILL to it and all that it started. Nothing happens when it has ended."""
        self._send(m.SendSignal(id=self.id, signal=m.ProcessSignal.KILL))

    def close(self) -> None:
        """Kill it if it still runs, and wait a moment for its end. May be called twice."""
        if self._status is None and self._answered.wait(CLOSE_S) and self._started is not None:
            self.kill()
            self._ended.wait(CLOSE_S)

    def take(self, report: m.Report) -> bool:
        """Take a report of the agent about this process; return whether it is the last one."""
        if isinstance(report, m.Started):
            self._started = report
            self._answered.set()
        elif isinstance(report, m.Refused):
            self._refusal = printable(report.message)
            self._answered.set()
        elif isinstance(report, m.EventReport) and self._status is None:
            self._listener.event(self.name, report.event)
        elif isinstance(report, m.OutputReport) and self._status is None:
            self._listener.output(self.name, report.stream, report.text)
        elif isinstance(report, m.Exited):
            self._end(report.status)
        return isinstance(report, m.Refused | m.Exited)

    def lose(self, loss: Loss) -> None:
        """Report the loss of its agent."""
        if self._started is None:
            self._refusal, self._killed_by_user = loss.why, loss.killed_by_user
            self._answered.set()
        elif self._status is None:
            message = f"{self._label}: {loss.why}; the job was stopped"
            event = {
                "event": "error",
                "message": message,
                "exit_code": 1,
                "host_lost": True,
                "unwanted": loss.killed_by_user,
            }
            try:
                self._listener.event(self.name, event)
            finally:
                self._end(LOST_STATUS)

    def _end(self, status: int) -> None:
        with self._lock:
            if self._status is not None:
                return
            self._status = status
            name, listener = self.name, self._listener
        self._answered.set()  # also of a process whose start was never reported
        self._ended.set()
        listener.exited(name, status)
