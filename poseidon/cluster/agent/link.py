"""The launcher's end of the line to an agent, and the processes behind it.

Law: no call blocks for long. When the line ends, breaks or falls silent, each process behind it is told to have failed
with a sentence that names the host, then to have ended; its agent ends it over there.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from poseidon import __version__
from poseidon.cluster.agent.line_channel import LineChannel
from poseidon.cluster.agent.remote_process import FarProcess
from poseidon.cluster.agent.wire import (
    OWN_INTERPRETER,
    PROTOCOL,
    Beat,
    Greet,
    Here,
    Leave,
    Order,
    Refused,
    Report,
    Start,
    Unwanted,
    WireError,
    decode_report,
    encode_order,
)
from poseidon.cluster.process import Listener, ProcessSpec
from poseidon.errors import JobError, printable

BEAT_S = 2.0
START_S = 60.0
MOST_WAITING = 10_000
# Each side knows its own paths to Python's modules.
_NOT_SENT = frozenset({"PYTHONPATH"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How long the two ends wait for each other, in seconds.

    Attributes:
        greet_s: for the agent to be there; Python starts slowly on a busy machine.
        silence_s: an agent without a word for so long counts as gone; it says one every two seconds.
        launcher_silence_s: the same for the launcher, by its agents. It is longer, for a launcher may be stopped
            for a moment (Ctrl-Z), and when it is gone for good nothing waits.
        grace_s: from SIGTERM to SIGKILL when an agent ends its processes.
    """

    greet_s: float = 60.0
    silence_s: float = 10.0
    launcher_silence_s: float = 20.0
    grace_s: float = 5.0


class AgentLink:
    """One agent, as the launcher sees it.

    Args:
        channel: the line to it; owned from here on.
        where: the host in messages, `ml@node3`.
        settings: how long to wait for what.
    """

    def __init__(self, channel: LineChannel, where: str, settings: LinkSettings) -> None:
        self._channel = channel
        self._where = where
        self._settings = settings
        self._lock = threading.Lock()
        self._processes: dict[int, FarProcess] = {}
        self._outbox: queue.Queue[Order] = queue.Queue(MOST_WAITING)
        self._here = threading.Event()
        self._over = threading.Event()
        self._lost: str | None = None
        self._unwanted = False
        self._scratch, self._cores = "", 1
        self._heard_s = time.monotonic()
        self._listening = False
        self._threads = [
            threading.Thread(target=self._receive, name=f"poseidon {where} receive", daemon=True),
            threading.Thread(target=self._send, name=f"poseidon {where} send", daemon=True),
        ]

    @property
    def where(self) -> str:
        """The host, for messages."""
        return self._where

    @property
    def lost(self) -> str | None:
        """Why the agent can no longer be reached; None while it can."""
        return self._lost

    @property
    def scratch(self) -> str:
        """A folder there that only this user can enter, until the agent goes; known once it was greeted."""
        return self._scratch

    @property
    def cores(self) -> int:
        """CPUs that processes there may use; known once it was greeted."""
        return self._cores

    def greet(self, record: Mapping[str, object]) -> None:
        """Say who we are and wait for the agent to answer.

        Args:
            record: the job, as `record_fields` writes it.

        Raises:
            JobError: it does not answer, or is of another version.
        """
        for thread in self._threads:
            thread.start()
        settings = self._settings
        self._order(
            Greet(
                protocol=PROTOCOL,
                version=__version__,
                record=record,
                silence_s=settings.launcher_silence_s,
                grace_s=settings.grace_s,
            )
        )
        if not self._here.wait(settings.greet_s) and self._lost is None:
            self._lose(f"its agent was not there within {settings.greet_s:g} s")
        if self._lost is not None:
            raise JobError(f"{self._where}: {self._lost}")

    def start(self, spec: ProcessSpec, listener: Listener) -> FarProcess:
        """Start a process there; see `Launcher.start`.

        Raises:
            JobError: it cannot be started, or the agent has gone.
        """
        with self._lock:
            process = FarProcess(spec.name, len(self._processes), self._where, listener, self._order)
            self._processes[process.id] = process
        program, *arguments = spec.argv
        self._order(
            Start(
                id=process.id,
                name=spec.name,
                argv=(OWN_INTERPRETER if program == sys.executable else program, *arguments),
                environment={
                    name: value for name, value in spec.environment.items() if name not in _NOT_SENT
                },
                first_line=spec.first_line.decode(),
            )
        )
        if self._lost is not None:  # a process that came too late to be told with the others
            process.lose(self._lost, unwanted=self._unwanted)
        process.await_start(START_S)
        return process

    def close(self) -> None:
        """Have the agent end what still runs there and go; returns when the line has ended. May be called twice."""
        if not self._over.is_set() and self._lost is None:
            self._order(Leave())
            self._threads[0].join(self._settings.grace_s + BEAT_S)
        self._over.set()
        self._channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(BEAT_S)

    def _order(self, order: Order) -> None:
        # A queue that is full belongs to a line that carries nothing any more; its silence is about to be noticed.
        with suppress(queue.Full):
            self._outbox.put_nowait(order)

    def _send(self) -> None:
        while not self._over.is_set() and self._lost is None:
            try:
                order: Order = self._outbox.get(timeout=BEAT_S / 2)
            except queue.Empty:
                order = Beat()
            try:
                self._channel.send(encode_order(order))
            except OSError as error:
                self._lose(f"the line to it broke ({str(error) or type(error).__name__})")
            if isinstance(order, Leave):
                return
            silent_s = time.monotonic() - self._heard_s
            if self._here.is_set() and not self._listening and silent_s > self._settings.silence_s:
                self._lose(f"it has said nothing for {self._settings.silence_s:g} s")

    def _receive(self) -> None:
        while (line := self._channel.receive()) is not None:
            self._listening = True
            try:
                self._hear(decode_report(line))
            except WireError as error:
                return self._lose(f"what answers there is no agent of this job ({error})")
            finally:
                self._heard_s = time.monotonic()
                self._listening = False
        return self._lose("the line to it has ended")

    def _hear(self, report: Report) -> None:
        if isinstance(report, Beat):
            return
        if isinstance(report, Here):
            self._scratch, self._cores = report.scratch, max(1, report.cores)
            self._here.set()
        elif isinstance(report, Refused) and report.id == -1:
            self._lose(printable(report.message))
        elif isinstance(report, Unwanted):
            self._lose("the job was killed there", unwanted=True)
        else:
            process = self._processes.get(report.id)
            if process is not None:
                process.hear(report)

    def _lose(self, why: str, *, unwanted: bool = False) -> None:
        with self._lock:
            if self._lost is not None or self._over.is_set():
                return
            self._lost, self._unwanted = why, unwanted
            processes = list(self._processes.values())
        self._here.set()
        self._channel.close()
        for process in processes:
            process.lose(why, unwanted=unwanted)
