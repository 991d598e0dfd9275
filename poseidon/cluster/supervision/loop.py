"""Running a job: starts its processes, feeds what happens to `Supervision`, does what that says.

Law: no process outlives `run_job`, whichever way it is left. All decisions are in `supervision.py`; here
are the queue, the clock and the signals.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from poseidon.cluster.events import parse_event
from poseidon.cluster.jobs.registry import Registration
from poseidon.cluster.plan import JobPlan, ProcessName, ShardPlan, WorkerPlan
from poseidon.cluster.process import Launcher, ProcessSpec, RunningProcess
from poseidon.cluster.supervision.settings import SupervisionSettings
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state_machine import Supervision
from poseidon.cluster.supervision.steps import (
    Action,
    Exited,
    Heard,
    Input,
    JobState,
    Kill,
    NotStarted,
    Outcome,
    Send,
    Started,
    Tick,
)
from poseidon.errors import JobError, JobKilled

# How late a deadline or a signal may be noticed.
TICK_S = 0.1
# Messages from all processes that may wait for the launcher; a process that floods is slowed down by it.
MOST_WAITING = 10_000


class JobListener:
    """An observer of a job's processes. A subclass overrides what it needs; the others do nothing.

    `run_job` calls it from its own thread. What a method raises ends the job and passes through `run_job`.
    """

    def on_started(self) -> None:
        """Note that all shards listen and all workers are ready."""

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Receive an event of a process, as it came."""

    def on_log(self, name: ProcessName, line: str) -> None:
        """Receive a line of free text of a process."""

    def close(self) -> None:
        """Release what the listener holds. Its owner calls this after the last start of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job that did not fail went.

    Attributes:
        outcome: whether all iterations are done or it was asked to stop.
        iteration: the last that the first worker told of.
        elapsed_s: from the first start to the last exit.
        exit_code: 0, or that of the signal that stopped it.
    """

    outcome: Outcome
    iteration: int
    elapsed_s: float
    exit_code: int = 0


def run_job(
    plan: JobPlan,
    make_spec: Callable[[WorkerPlan | ShardPlan], ProcessSpec],
    launcher: Launcher,
    *,
    listener: JobListener,
    settings: SupervisionSettings,
    registration: Registration | None = None,
    requests: SignalRequests | None = None,
) -> JobResult:
    """Run a job to its end.

    Args:
        plan: which processes, where.
        make_spec: how to start the process of one role.
        launcher: what starts it.
        listener: receives what the processes send.
        settings: time limits and signal effects.
        registration: the job's record, told of each process right after its start, and when none is left.
        requests: entered; None: signals are caught from here on.

    Raises:
        JobError: a process failed, ended early or fell silent, or the job was stopped before it had
            started; one sentence with the process, its host and the cause, and the exit code to use.
            Whatever else the listener raises passes through. In each case all processes have ended.
    """
    with nullcontext(requests) if requests is not None else SignalRequests(settings) as signals:
        run = _Run(plan, listener, settings, registration)
        try:
            run.start_all(plan, make_spec, launcher, signals)
            run.loop(signals)
        finally:
            run.close()
    return run.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A process said an event or a line."""

    name: ProcessName
    event: Mapping[str, object] | None
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gone:
    """A process has ended."""

    name: ProcessName
    status: int


class _Inbox:
    """The listener of all processes: one bounded queue to the loop, until it is closed."""

    def __init__(self) -> None:
        self._queue: queue.Queue[_Said | _Gone] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._put(_Said(name=name, event=event, line=""))

    def log(self, name: ProcessName, line: str) -> None:
        self._put(_Said(name=name, event=None, line=line))

    def exited(self, name: ProcessName, status: int) -> None:
        self._put(_Gone(name=name, status=status))

    def get(self, timeout_s: float) -> _Said | _Gone | None:
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closed.set()

    def _put(self, what: _Said | _Gone) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(what, timeout=TICK_S)
            except queue.Full:
                continue
            return


class _Run:
    """The processes of one job and the loop around its state machine."""

    def __init__(
        self,
        plan: JobPlan,
        listener: JobListener,
        settings: SupervisionSettings,
        registration: Registration | None,
    ) -> None:
        self._began_s = time.monotonic()
        self._supervision = Supervision([role.process for role in plan.roles], settings, self._began_s)
        self._listener = listener
        self._registration = registration
        self._inbox = _Inbox()
        self._running: dict[ProcessName, RunningProcess] = {}
        self._last_line: dict[ProcessName, str] = {}
        self._told_started = False

    def start_all(
        self,
        plan: JobPlan,
        make_spec: Callable[[WorkerPlan | ShardPlan], ProcessSpec],
        launcher: Launcher,
        requests: SignalRequests,
    ) -> None:
        """Start shards and workers together: a worker takes seconds to load, a shard is up by then."""
        for role in plan.roles:
            self._take_requests(requests)
            if self._supervision.state is not JobState.STARTING:
                return
            try:
                process = launcher.start(make_spec(role), role.host, self._inbox)
            except JobError as error:
                unwanted = isinstance(error, JobKilled)
                self._handle(NotStarted(name=role.process, message=str(error), unwanted=unwanted))
                return
            self._running[role.process] = process
            if self._registration is not None:
                self._registration.add(role.process, process.pid, process.created_s)
            self._handle(Started(name=role.process, pid=process.pid))

    def loop(self, requests: SignalRequests) -> None:
        """Until no process is left."""
        while self._supervision.state is not JobState.ENDED:
            self._take_requests(requests)
            what = self._inbox.get(TICK_S)
            if what is None:
                self._handle(Tick())
            elif isinstance(what, _Gone):
                last_line = self._last_line.get(what.name, "")
                self._handle(Exited(name=what.name, status=what.status, last_line=last_line))
            else:
                self._hear(what)
            if not self._told_started and self._supervision.all_ready:
                self._told_started = True
                self._listener.on_started()

    def close(self) -> None:
        """End what still runs, and let go of everything."""
        self._inbox.close()
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.close()
        none_left = all(process.poll() is not None for process in self._running.values())
        if self._registration is not None and none_left:
            self._registration.clear()

    def result(self) -> JobResult:
        """How it went.

        Raises:
            JobError: it failed.
        """
        if self._supervision.error is not None:
            raise self._supervision.error
        return JobResult(
            outcome=self._supervision.outcome,
            iteration=self._supervision.iteration,
            elapsed_s=time.monotonic() - self._began_s,
            exit_code=self._supervision.exit_code,
        )

    def _hear(self, said: _Said) -> None:
        if said.event is None:
            if said.line.strip():
                self._last_line[said.name] = said.line.strip()
            self._listener.on_log(said.name, said.line)
        else:
            self._handle(Heard(name=said.name, event=parse_event(said.event)))
            self._listener.on_event(said.name, said.event)

    def _take_requests(self, requests: SignalRequests) -> None:
        for request in requests.take():
            self._handle(request)

    def _handle(self, what: Input) -> None:
        for action in self._supervision.handle(what, time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        process = self._running[action.name]
        if isinstance(action, Send):
            process.send_line(action.line)
        elif isinstance(action, Kill):
            process.kill()
        else:
            process.terminate()
