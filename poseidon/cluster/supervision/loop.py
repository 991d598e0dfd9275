"""The loop that runs a job: starts its processes, passes events to the `JobStateMachine`,
carries out its actions.

Law: no process outlives `run_job`, however it is left, save those that have paused and were given
to `kept`. All decisions are in `state_machine.py`; the queue, the clock and the signals are here.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from poseidon.base.text_files import LineAssembler, OutputLine
from poseidon.cluster.agent.remote_process import RemoteProcess
from poseidon.cluster.events import Paused, parse_event
from poseidon.cluster.job_plan import JobPlan, ProcessName, ShardPlan, WorkerPlan
from poseidon.cluster.jobs.registry import Registration
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import Listener, OutputStream, ProcessSpec
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import (
    Action,
    JobEvent,
    JobResult,
    JobState,
    Kill,
    Pausing,
    ProcessExited,
    ProcessReported,
    ProcessStarted,
    ProcessStartFailed,
    SendLine,
    SupervisionSettings,
    Tick,
)
from poseidon.cluster.supervision.state_machine import JobStateMachine
from poseidon.errors import JobError, JobKilled

# The period at which deadlines and signals are checked.
TICK_S = 0.1
# Messages of all processes that wait for the launcher; when it is full, processes wait.
MAX_QUEUED = 10_000

StartProcess = Callable[[ProcessSpec, Host, Listener], RemoteProcess]


class JobListener:
    """A listener of a job's events.

    A subclass overrides the methods that it needs; the others do nothing.

    `run_job` calls it from its own thread. An exception of a method ends the job and passes through
    `run_job`.
    """

    def on_started(self) -> None:
        """Handle the start: all shards listen and all workers are ready."""

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Handle an event that a process printed, as it came."""

    def on_output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        """Handle a piece of free text as a process wrote it; `on_log` gets its lines too."""

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        """Handle a line of free text that a process wrote."""

    def close(self) -> None:
        """Release what the listener holds. Its owner calls this after the last start of the job."""


def run_job(
    plan: JobPlan,
    make_spec: Callable[[WorkerPlan | ShardPlan], ProcessSpec],
    start: StartProcess,
    *,
    listener: JobListener,
    settings: SupervisionSettings,
    registration: Registration,
    requests: SignalRequests,
    pausing: Pausing = Pausing.NEVER,
    kept: Callable[[Mapping[ProcessName, Paused]], object] = lambda _: None,
) -> JobResult:
    """Run one start of a job to its end.

    Args:
        plan: the processes and their hosts.
        make_spec: returns the specification of one process.
        start: asks its host to start it, and returns at once, with its first line on its way.
            Hosts start theirs at the same time; `RemoteProcess.await_start` tells whether it has
            come to life. It raises JobError.
        listener: notified of events and output.
        settings: timeouts and effects of signals.
        registration: the job's record; each process is added right after its start, and all are
            removed at the end.
        requests: entered.
        pausing: when processes pause after a loss.
        kept: takes the processes that have paused when this start has ended, for the next one; they
            continue running, and have no listener until then. Not called if there are none.

    Raises:
        JobError: a process failed, ended early or fell silent, or the job was stopped before it had
            started; one sentence with the process, its host and the cause, and the exit code to
            use. Any other exception of the listener passes through. In each case all other
            processes have ended.
    """
    run = _Run(plan, listener, settings, registration, pausing)
    try:
        run.start_all(plan, make_spec, start, requests)
        run.loop(requests)
    finally:
        paused = run.close()
        if paused:
            kept(paused)
    run.hand_on(requests)
    return run.result()


class _Run:
    """The processes of one job, the loop around its state machine, and their `Listener`."""

    def __init__(
        self,
        plan: JobPlan,
        listener: JobListener,
        settings: SupervisionSettings,
        registration: Registration,
        pausing: Pausing,
    ) -> None:
        names = [role.process for role in plan.roles]
        self._machine = JobStateMachine(names, settings, time.monotonic(), pausing)
        self._listener = listener
        self._registration = registration
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUEUED)
        """What happens to the processes, in order, until the loop has ended."""
        self._ended = threading.Event()
        self._running: dict[ProcessName, RemoteProcess] = {}
        self._lines: dict[tuple[ProcessName, OutputStream], LineAssembler] = {}
        self._last_line: dict[ProcessName, str] = {}
        self._start_reported = False

    def start_all(
        self,
        plan: JobPlan,
        make_spec: Callable[[WorkerPlan | ShardPlan], ProcessSpec],
        start: StartProcess,
        requests: SignalRequests,
    ) -> None:
        """Start shards and workers together: a worker takes seconds to load, a shard is up by
        then. All hosts are asked first, so that they start theirs at the same time.
        """
        for role in plan.roles:
            self._take_requests(requests)
            if self._machine.state is not JobState.STARTING:
                return
            try:
                self._running[role.process] = start(make_spec(role), role.host, self)
            except JobError as error:
                self._not_started(role.process, error)
                return
        waiting = list(self._running.items())
        while waiting:
            self._take_requests(requests)
            if self._machine.state is not JobState.STARTING:
                return
            name, process = waiting[0]
            try:
                process.await_start()
            except JobError as error:
                self._not_started(name, error)
                return
            started = list(itertools.takewhile(lambda each: each[1].pid, waiting))
            del waiting[: len(started)]
            self._registration.add([process for _, process in started])
            for name, process in started:
                self._handle(ProcessStarted(name=name, pid=process.pid))

    def _not_started(self, name: ProcessName, error: JobError) -> None:
        killed = isinstance(error, JobKilled)
        self._handle(ProcessStartFailed(name=name, message=str(error), killed_by_user=killed))

    def loop(self, requests: SignalRequests) -> None:
        """Handle events until no process is left."""
        while self._machine.state is not JobState.ENDED:
            self._take_requests(requests)
            try:
                handle = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                handle = partial(self._handle, Tick())
            handle()
            if not self._start_reported and self._machine.all_ready:
                self._start_reported = True
                self._listener.on_started()

    def close(self) -> Mapping[ProcessName, Paused]:
        """Kill what still runs and has not paused, and release everything; return what has paused.

        A process that is killed beside some that have paused is not waited for: its host may be
        lost, and the next start should begin at once.
        """
        self._ended.set()
        paused = self._machine.paused
        others = [process for name, process in self._running.items() if name not in paused]
        for process in others:
            process.kill()
        for process in others if not paused else ():
            process.close()
        if paused:
            self._registration.keep([self._running[name] for name in paused])
        elif all(one.poll() is not None for one in others):
            self._registration.keep(())
        return paused

    def hand_on(self, requests: SignalRequests) -> None:
        """Leave a request to stop that this start has not followed to the next one."""
        stop = self._machine.unfinished_stop
        if stop is not None:
            requests.repeat(stop)

    def result(self) -> JobResult:
        """Return the result.

        Raises:
            JobError: it failed.
        """
        if self._machine.error is not None:
            raise self._machine.error
        return self._machine.result

    def _put(self, handle: Callable[[], None]) -> None:
        """Have the loop call something; wait while its queue is full."""
        while not self._ended.is_set():
            with suppress(queue.Full):
                self._inbox.put(handle, timeout=TICK_S)
                return

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._put(partial(self._take_event, name, event))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self._put(partial(self._take_output, name, stream, text))

    def exited(self, name: ProcessName, status: int) -> None:
        self._put(partial(self._take_exit, name, status))

    def _take_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._handle(ProcessReported(name=name, event=parse_event(event)))
        self._listener.on_event(name, event)

    def _take_output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self._listener.on_output(name, stream, text)
        lines = self._lines.setdefault((name, stream), LineAssembler())
        self._log(name, stream, lines.feed(text))

    def _take_exit(self, name: ProcessName, status: int) -> None:
        for stream in OutputStream:
            if (lines := self._lines.pop((name, stream), None)) is not None:
                self._log(name, stream, lines.finish())
        last_line = self._last_line.get(name, "")
        self._handle(ProcessExited(name=name, status=status, last_line=last_line))

    def _log(self, name: ProcessName, stream: OutputStream, lines: Sequence[OutputLine]) -> None:
        for line in lines:
            if line.text.strip():
                self._last_line[name] = line.text.strip()
            self._listener.on_log(name, stream, line)

    def _take_requests(self, requests: SignalRequests) -> None:
        if self._machine.state is JobState.PAUSING:
            return  # they are for the next start
        for request in requests.take():
            self._handle(request)

    def _handle(self, event: JobEvent) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._do(action)

    def _do(self, action: Action) -> None:
        process = self._running[action.name]
        if isinstance(action, SendLine):
            process.send_line(action.line)
        elif isinstance(action, Kill):
            process.kill()
        else:
            process.terminate()
