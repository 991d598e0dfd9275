"""The I/O of an agent: a job's processes, files and checks on one host, for its launcher.

Law: no process of the job outlives the channel. When the channel ends, breaks or falls silent, and
when the agent is stopped, all processes get SIGTERM, then SIGKILL, and `serve` returns. No request
reaches a shell, save as the argument list of a process that this user asked for.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from poseidon.base.settings import read_settings
from poseidon.cluster import host_probe
from poseidon.cluster.agent import files
from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.agent import Action, AgentState, EndProcesses
from poseidon.cluster.agent.child import ChildProcess, ChildSettings, start_child
from poseidon.cluster.agent.connection import HEARTBEAT_S, MAX_QUEUED, TICK_S, LauncherChannel
from poseidon.cluster.agent.files import AgentFolder
from poseidon.cluster.agent.messages import REQUESTS, WireError
from poseidon.cluster.agent.template import Templates
from poseidon.cluster.dial.channel import Channel
from poseidon.cluster.doctor.probe import Probe
from poseidon.cluster.job_plan import ProcessName
from poseidon.cluster.jobs.kill import AGENT
from poseidon.cluster.jobs.registry import (
    JobRecord,
    RecordedProcess,
    Registry,
)
from poseidon.cluster.jobs.this_host import KillRequest, kill_jobs, list_jobs
from poseidon.cluster.process import OutputStream, creation
from poseidon.errors import JobError, PoseidonError, limit_reached
from poseidon.version import __version__
from ps_server.json_fields import fields_of, value_of
from ps_server.monitor import owned_thread

HELLO_S = 60.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of an agent.

    Attributes:
        children: of the processes that it starts.
        python: the interpreter that they run with, where the launcher names none.
        hello_s: how long the launcher may take to send `AgentHello`.
        launcher: the launcher in messages.
    """

    children: ChildSettings = field(default_factory=ChildSettings)
    python: str = sys.executable
    hello_s: float = HELLO_S
    launcher: str = "the launcher"


class _Record:
    """The record of the job on this host, unless that is the launcher's own."""

    def __init__(self) -> None:
        self.registry = Registry(read_settings().state_folder)
        self._record: JobRecord | None = None

    def take(self, register: m.Register) -> None:
        me = os.getpid()
        launcher = RecordedProcess(name=AGENT, host=LOOPBACK, pid=me, created=creation(me))
        self._record = replace(register.record, launcher=launcher)

    def add(self, name: ProcessName, process: ChildProcess) -> None:
        """Put a process on record."""
        if self._record is None:
            return
        added = RecordedProcess(
            name=name.describe(), host=LOOPBACK, pid=process.pid, created=process.created
        )
        self._record = replace(self._record, processes=(*self._record.processes, added))
        with suppress(PoseidonError):  # kill finds processes by the job's id, too
            there = self.registry.read(self._record.job)
            if there is None or there.launcher == self._record.launcher:
                self.registry.write(self._record)

    def remove(self) -> None:
        """Take the job off the record."""
        record, self._record = self._record, None
        with suppress(PoseidonError):
            there = None if record is None else self.registry.read(record.job)
            if record is not None and there is not None and there.launcher == record.launcher:
                self.registry.remove(record.job)


class Agent:
    """An agent and its host.

    Args:
        channel: to the launcher; closed at the end.
        settings: its settings.
    """

    def __init__(self, channel: Channel, settings: AgentSettings | None = None) -> None:
        self._settings = settings or AgentSettings()
        self._state = AgentState(
            __version__, self._settings.hello_s, time.monotonic(), self._settings.launcher
        )
        self._connection = LauncherChannel(channel, lambda: self.greeted)
        self._record = _Record()
        self._running: dict[int, ChildProcess] = {}
        self._scratch: AgentFolder | None = None
        self._leave: EndProcesses | None = None
        self._file_requests: queue.Queue[m.Put | m.ReadFile | None] = queue.Queue(MAX_QUEUED)
        self._signals: queue.SimpleQueue[Callable[[], list[Action]]] = queue.SimpleQueue()
        self._links = Probe()
        self._templates = Templates()
        self._perform: dict[type[m.Request], Callable[[Any], None]] = {
            m.AgentHello: self._welcome,
            m.Register: self._record.take,
            m.StartProcess: self._start,
            m.WriteLine: self._send_line,
            m.SendSignal: self._send_signal,
            m.Ask: lambda ask: self._thread("ask", lambda: self._answer(ask)).start(),
            m.Put: self._file_requests.put,
            m.ReadFile: self._file_requests.put,
            m.EndAll: self._end_job,
        }

    @property
    def greeted(self) -> bool:
        """Whether the launcher has sent `AgentHello`."""
        return self._state.greeted

    def serve(self) -> EndProcesses:
        """Serve the launcher until it ends the agent, or is lost; return how that came."""
        receiver, sender, filer = (
            self._thread("receive", self._connection.receive),
            self._thread("send", self._connection.send),
            self._thread("files", self._serve_files),
        )
        sender.start()
        try:
            receiver.start()
            filer.start()
            while self._leave is None:
                for action in self._next_actions():
                    self._do(action)
            return self._leave
        except (OSError, RuntimeError) as error:  # no room, or no thread can be started
            why = limit_reached(error) or str(error).partition("] ")[2] or str(error)
            self.report(m.Refused(id=m.AGENT_ITSELF, message=why), timeout_s=HEARTBEAT_S)
            return EndProcesses(status=1, reason=why)
        finally:
            self._end_processes()
            self._links.close()
            self._templates.close()
            if self._scratch is not None:
                self._scratch.close()
            self._file_requests.put(None)
            self._connection.end(sender)
            if receiver.ident is not None:
                receiver.join(TICK_S)  # it may wait in a read that only the launcher's end can end

    def stop(self, reason: str) -> None:
        """End everything and return from `serve`. Signal handlers may call it."""
        self._signals.put(lambda: [EndProcesses(status=1, reason=reason)])

    def killed_by_user(self) -> None:
        """As `stop`, after a report that the user has killed the job on this host."""
        self._signals.put(self._state.killed_by_user)

    def signaled(self, name: str) -> None:
        """Report a signal by which the machine or the scheduler asks to end. Signal handlers may
        call it.
        """
        self._signals.put(lambda: self._state.signaled(name))

    def _next_actions(self) -> list[Action]:
        if not self._signals.empty():
            return self._signals.get()()
        if self._connection.lost.is_set():
            return self._state.end_of_channel(self._connection.why_lost)
        try:
            encoded = self._connection.inbox.get(timeout=TICK_S)
        except queue.Empty:
            return self._state.tick(time.monotonic())
        if encoded is None:
            return self._state.end_of_channel()
        try:
            return self._state.take(REQUESTS.decode(encoded), time.monotonic())
        except WireError as error:
            return self._state.reject(str(error))

    def _do(self, action: Action) -> None:
        if isinstance(action, EndProcesses):
            self._leave = self._leave or action
        elif isinstance(action, m.Report):
            self.report(action, timeout_s=HEARTBEAT_S)
        else:
            self._perform[type(action)](action)

    def _welcome(self, hello: m.AgentHello) -> None:
        self._scratch = AgentFolder()
        self._reply(m.AgentWelcome(cores=host_probe.cores(), scratch=self._scratch.path))

    def _start(self, request: m.StartProcess) -> None:
        spec = request.spec
        if spec.argv[0] == m.OWN_INTERPRETER:
            spec = replace(spec, argv=(self._settings.python, *spec.argv[1:]))
        forwarder = _Forwarder(self, request.id)
        try:
            process = start_child(spec, forwarder, self._settings.children, self._templates)
        except JobError as error:
            self._reply(m.Refused(id=request.id, message=str(error)))
            return
        self._running[request.id] = process
        self._record.add(spec.name, process)
        self._reply(m.Started(id=request.id, pid=process.pid, created=process.created))
        forwarder.started.set()

    def _send_line(self, request: m.WriteLine) -> None:
        if (process := self._running.get(request.id)) is not None:
            process.send_line(request.line)

    def _send_signal(self, request: m.SendSignal) -> None:
        if (process := self._running.get(request.id)) is not None:
            if request.signal is m.ProcessSignal.KILL:
                process.kill()
            else:
                process.terminate()

    def _end_job(self, request: m.EndAll) -> None:
        self._end_processes()
        assert self._scratch is not None  # since `AgentHello`
        self._scratch.clear()
        self._reply(m.Answer(id=request.id, answer={}))

    def _answer(self, ask: m.Ask) -> None:
        try:
            answer: Mapping[str, object] = _SERVICES[ask.service](self, ask.request)
        except Exception as error:  # noqa: BLE001 - the thread's outermost frame: the launcher raises it
            why = str(error) if isinstance(error, PoseidonError) else repr(error)
            self.report(m.Refused(id=ask.id, message=why))
            return
        self.report(m.Answer(id=ask.id, answer=answer))

    def _make_template(self, request: Mapping[str, Any]) -> Mapping[str, object]:
        """Import modules; processes in this environment that need them are forked from then on."""
        children = self._settings.children
        with suppress(OSError):  # they are started
            self._templates.of(
                self._settings.python,
                request["imports"],
                {**children.environment, **request["environment"]},
                children.folder,
            ).wait()
        return {}

    def _serve_files(self) -> None:
        while (part := self._file_requests.get()) is not None:
            report: m.Report
            try:
                if isinstance(part, m.ReadFile):
                    report = files.get(part)
                else:
                    files.put(part)
                    report = m.Answer(id=part.id, answer={})
            except (OSError, ValueError) as error:
                report = m.Refused(id=part.id, message=getattr(error, "strerror", "") or str(error))
            self.report(report)

    def _end_processes(self) -> None:
        """End all processes, and take the job off the record."""
        processes = [process for process in self._running.values() if process.poll() is None]
        for process in processes:
            process.terminate()
        deadline_s = time.monotonic() + self._state.grace_s
        while (
            any(process.poll() is None for process in processes) and time.monotonic() < deadline_s
        ):
            time.sleep(TICK_S / 4)
        for process in self._running.values():
            process.close()
        self._running.clear()
        self._record.remove()

    def report(self, report: m.Report, *, timeout_s: float = math.inf) -> bool:
        """Queue a report; wait while the channel is slow.

        Drop it, and return False, when the channel is lost or time is up.
        """
        return self._connection.report(report, timeout_s)

    def _reply(self, report: m.Report) -> None:
        """Queue a report from the loop, which has to check for silence and for signals."""
        while not self.report(report, timeout_s=TICK_S):
            if self._connection.lost.is_set() or not self._signals.empty():
                return
            for action in self._state.tick(time.monotonic()):
                self._do(action)
            if self._leave is not None:
                return

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        def failed(error: Exception) -> None:
            print(f"poseidon agent: {role}: {type(error).__name__}: {error}", file=sys.stderr)
            self._connection.lost.set()  # `serve` ends

        return owned_thread(f"poseidon agent {role}", work, failed)


_SERVICES: Mapping[m.Service, Callable[[Agent, Mapping[str, Any]], Mapping[str, object]]] = {
    m.Service.CHECK: lambda _, request: fields_of(
        host_probe.answer(value_of(host_probe.Check, request))
    ),
    m.Service.FILES: lambda agent, request: files.answer(request),
    m.Service.LIST: lambda agent, _: fields_of(list_jobs(agent._record.registry)),
    m.Service.KILL: lambda agent, request: fields_of(
        kill_jobs(value_of(KillRequest, request), agent._record.registry)
    ),
    m.Service.TEMPLATE: Agent._make_template,
    m.Service.LINKS: lambda agent, request: agent._links.answer(dict(request)),
}


class _Forwarder:
    """The listener of one process: forwards to the launcher, after `Started` was reported."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._id = number
        self.started = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._forward(m.EventReport(id=self._id, event=event))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self._forward(m.OutputReport(id=self._id, stream=stream, text=text))

    def exited(self, name: ProcessName, status: int) -> None:
        self._forward(m.Exited(id=self._id, status=status))

    def _forward(self, report: m.Report) -> None:
        self.started.wait(HELLO_S)
        self._agent.report(report)
