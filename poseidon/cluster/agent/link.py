"""The launcher's end of the channel to an agent, and the agent's processes.

Law: no call blocks for long. When the channel ends, breaks or falls silent, each of the agent's
processes is reported as failed, with a sentence that names the host, then as ended; the agent ends
it on its host.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from poseidon import __version__
from poseidon.cluster.agent.line_channel import LineChannel
from poseidon.cluster.agent.messages import (
    OWN_INTERPRETER,
    PROTOCOL,
    Heartbeat,
    Hello,
    KilledByUser,
    Refused,
    Report,
    Request,
    Shutdown,
    Start,
    Welcome,
)
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.agent.wire import REPORTS, REQUESTS, WireError
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError, printable

HEARTBEAT_S = 2.0
START_S = 60.0
MAX_QUEUED = 10_000
# Each side knows its own paths to Python's modules.
_NOT_SENT = frozenset({"PYTHONPATH"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The timeouts between launcher and agent, in seconds.

    Attributes:
        hello_s: until the agent answers `Hello`; Python starts slowly on a busy machine.
        silence_s: without a report from the agent until it counts as lost; it sends heartbeats
            every two seconds.
        launcher_silence_s: without a request from the launcher until its agents take it for lost.
            It is longer, since a launcher may be stopped for a moment (Ctrl-Z), and when it has
            ended nothing waits for its agents.
        grace_s: from SIGTERM to SIGKILL when an agent ends its processes.
    """

    hello_s: float = 60.0
    silence_s: float = 10.0
    launcher_silence_s: float = 20.0
    grace_s: float = 5.0


class AgentLink:
    """One agent, as the launcher sees it.

    Args:
        channel: to it; owned from here on.
        label: the host in messages, `ml@node3`.
        settings: the timeouts.
    """

    def __init__(self, channel: LineChannel, label: str, settings: LinkSettings) -> None:
        self._channel = channel
        self._label = label
        self._settings = settings
        self._lock = threading.Lock()
        self._processes: dict[int, RemoteProcess] = {}
        self._requests: queue.Queue[Request] = queue.Queue(MAX_QUEUED)
        self._welcomed = threading.Event()
        self._closed = threading.Event()
        self._lost: str | None = None
        self._killed_by_user = False
        self._scratch, self._cores = "", 1
        self._received_s = time.monotonic()
        self._in_listener = False
        self._threads = [
            self._thread("receive", self._receive),
            self._thread("send", self._send),
        ]

    @property
    def label(self) -> str:
        """The host in messages."""
        return self._label

    @property
    def lost(self) -> str | None:
        """Why the agent is lost; None while it is not."""
        return self._lost

    @property
    def scratch(self) -> str:
        """A folder there that only this user can enter, until the agent exits; known once
        connected.
        """
        return self._scratch

    @property
    def cores(self) -> int:
        """CPUs that processes there may use; known once connected."""
        return self._cores

    def connect(self, record: Mapping[str, object]) -> None:
        """Send `Hello` and wait for the agent's answer.

        Args:
            record: the job, as `record_fields` writes it.

        Raises:
            JobError: the agent does not answer, or is of another version.
        """
        for thread in self._threads:
            thread.start()
        settings = self._settings
        self._request(
            Hello(
                protocol=PROTOCOL,
                version=__version__,
                record=record,
                silence_s=settings.launcher_silence_s,
                grace_s=settings.grace_s,
            )
        )
        if not self._welcomed.wait(settings.hello_s) and self._lost is None:
            self._lose(f"its agent did not answer within {settings.hello_s:g} s")
        if self._lost is not None:
            raise JobError(f"{self._label}: {self._lost}")

    def start(self, spec: ProcessSpec, listener: Listener) -> RemoteProcess:
        """Start a process there; see `Launcher.start`.

        Raises:
            JobError: it cannot be started, or the agent is lost.
        """
        with self._lock:
            process = RemoteProcess(
                spec.name, len(self._processes), self._label, listener, self._request
            )
            self._processes[process.id] = process
        program, *arguments = spec.argv
        self._request(
            Start(
                id=process.id,
                name=spec.name,
                argv=(OWN_INTERPRETER if program == sys.executable else program, *arguments),
                environment={
                    name: value for name, value in spec.environment.items() if name not in _NOT_SENT
                },
                first_line=spec.first_line.decode(),
                own_stdout=spec.own_stdout,
            )
        )
        if self._lost is not None:  # it was added after the loss was reported
            process.lose(self._lost, killed_by_user=self._killed_by_user)
        process.await_start(START_S)
        return process

    def close(self) -> None:
        """Have the agent end what still runs there and exit; return when the channel has ended.

        May be called twice.
        """
        if not self._closed.is_set() and self._lost is None:
            self._request(Shutdown())
            self._threads[0].join(self._settings.grace_s + HEARTBEAT_S)
        self._closed.set()
        self._channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(HEARTBEAT_S)

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the processes of the agent are the owners
                self._lose(f"its connection failed: {type(error).__name__}: {error}")

        return threading.Thread(target=run, name=f"poseidon {self._label} {role}", daemon=True)

    def _request(self, request: Request) -> None:
        # A full queue belongs to a channel that carries nothing any more; its silence is about to
        # be noticed.
        with suppress(queue.Full):
            self._requests.put_nowait(request)

    def _send(self) -> None:
        while not self._closed.is_set() and self._lost is None:
            try:
                request: Request = self._requests.get(timeout=HEARTBEAT_S / 2)
            except queue.Empty:
                request = Heartbeat()
            try:
                self._channel.send(REQUESTS.encode(request))
            except OSError as error:
                self._lose(f"the channel to it broke ({str(error) or type(error).__name__})")
            if isinstance(request, Shutdown):
                return
            silent_s = time.monotonic() - self._received_s
            if (
                self._welcomed.is_set()
                and not self._in_listener
                and silent_s > self._settings.silence_s
            ):
                self._lose(f"it has sent nothing for {self._settings.silence_s:g} s")

    def _receive(self) -> None:
        while (line := self._channel.receive()) is not None:
            self._in_listener = True
            try:
                self._take(REPORTS.decode(line))
            except WireError as error:
                return self._lose(f"what answers there is not an agent of this job ({error})")
            finally:
                self._received_s = time.monotonic()
                self._in_listener = False
        return self._lose("the channel to it has ended")

    def _take(self, report: Report) -> None:
        if isinstance(report, Heartbeat):
            return
        if isinstance(report, Welcome):
            self._scratch, self._cores = report.scratch, max(1, report.cores)
            self._welcomed.set()
        elif isinstance(report, Refused) and report.id == -1:
            self._lose(printable(report.message))
        elif isinstance(report, KilledByUser):
            self._lose("the job was killed there", killed_by_user=True)
        else:
            process = self._processes.get(report.id)
            if process is not None:
                process.take(report)

    def _lose(self, why: str, *, killed_by_user: bool = False) -> None:
        with self._lock:
            if self._lost is not None or self._closed.is_set():
                return
            self._lost, self._killed_by_user = why, killed_by_user
            processes = list(self._processes.values())
        self._welcomed.set()
        with ExitStack() as stack:  # each callback runs, whatever another one raises
            for process in reversed(processes):
                stack.callback(process.lose, why, killed_by_user=killed_by_user)
            stack.callback(self._channel.close)
