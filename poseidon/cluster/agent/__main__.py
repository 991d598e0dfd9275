"""The agent of a job on one host: `python -m poseidon.cluster.agent --job ID`.

It starts the job's processes for the launcher, forwards their events and output, and registers the
job on its host, so that `poseidon ps` and `poseidon kill` work there, too. It takes requests from
its standard input; `serve` does the same over any other channel (`poseidon.cluster.agent.messages`
has the messages).

Law: no process of the job outlives the channel. When the channel ends, breaks or falls silent, and
on SIGTERM, all processes get SIGTERM, then SIGKILL, and the agent exits. No request reaches a shell
or a path, save as the argument list of a process that this user asked for.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import psutil

from poseidon import __version__
from poseidon.cluster.agent.line_channel import LineChannel, PipeLineChannel
from poseidon.cluster.agent.messages import (
    OWN_INTERPRETER,
    PROTOCOL,
    EventReport,
    Exited,
    Heartbeat,
    Hello,
    KilledByUser,
    OutputReport,
    ProcessSignal,
    Refused,
    Report,
    Request,
    SendLine,
    SendSignal,
    Shutdown,
    Start,
    Started,
    Welcome,
)
from poseidon.cluster.agent.wire import REPORTS, REQUESTS, WireError
from poseidon.cluster.jobs.kill import AGENT, USER_KILL
from poseidon.cluster.jobs.registry import (
    JobRecord,
    RecordedProcess,
    Registry,
    check_job_id,
    record_from_fields,
)
from poseidon.cluster.local import LocalLauncher, LocalProcess
from poseidon.cluster.machinefile import Host
from poseidon.cluster.plan import ProcessName
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.errors import JobError, PoseidonError
from poseidon.settings import read_settings

HEARTBEAT_S = 2.0
TICK_S = 0.2
HELLO_S = 60.0
"""How long a launcher may take to send `Hello`."""
LONGEST_PAUSE_S = 5.0
"""A longer pause between two rounds of the loop means that this host was suspended, not the
launcher.
"""
MAX_QUEUED = 10_000
LOOPBACK = "127.0.0.1"


class Agent:
    """One job's processes on this host.

    Args:
        channel: to the launcher.
        job: the job's id, which `Hello` must name.
        registry: the records of this host's jobs.
    """

    def __init__(self, channel: LineChannel, job: str, registry: Registry) -> None:
        self._channel = channel
        self._job = job
        self._registry = registry
        self._launcher = LocalLauncher()
        self._running: dict[int, LocalProcess] = {}
        self._record: JobRecord | None = None
        self._scratch = ""
        self._silence_s, self._grace_s = HELLO_S, 5.0
        self._received_s = time.monotonic()
        self._inbox: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._outbox: queue.Queue[Report | None] = queue.Queue(MAX_QUEUED)
        self._lost = threading.Event()
        self._stopping = threading.Event()
        self._killed_by_user = False

    def serve(self) -> int:
        """Handle requests until the channel ends; return the exit code, 0 after `Shutdown`."""
        threads = [
            self._thread("receive", self._receive),
            self._thread("send", self._send),
        ]
        for thread in threads:
            thread.start()
        try:
            return self._handle_requests()
        finally:
            if self._killed_by_user:  # before the first process ends, which would look like a loss
                self.report(KilledByUser(), timeout_s=HEARTBEAT_S)
            self._end_all()
            self._end_reports()
            threads[1].join(HEARTBEAT_S)  # it sends the last reports
            self._lost.set()
            self._channel.close()
            threads[0].join(TICK_S)  # it may wait in a read that only the launcher's end can end

    def stop(self, *, killed_by_user: bool = False) -> None:
        """End everything and return from `serve`.

        May be called from any thread and from a signal handler.

        Args:
            killed_by_user: whether the user has killed the job, which is reported to the launcher.
        """
        self._killed_by_user = self._killed_by_user or killed_by_user
        self._stopping.set()

    def _handle_requests(self) -> int:
        self._received_s = awake_s = time.monotonic()
        while not self._stopping.is_set() and not self._lost.is_set():
            line, now = self._next_line(), time.monotonic()
            if now - awake_s > LONGEST_PAUSE_S:
                self._received_s += now - awake_s
            awake_s = now
            if line == b"":
                if now - self._received_s > self._silence_s:
                    return 1
                continue
            self._received_s = now
            if line is None:
                return 1
            request = self._decode(line)
            if request is None:
                return 1
            if isinstance(request, Shutdown):
                return 0
            self._handle(request)
        return 1

    def _next_line(self) -> bytes | None:
        """Return the next line, None when there will be none, empty when there is none yet."""
        try:
            return self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return b""

    def _decode(self, line: bytes) -> Request | None:
        """Return the request in a line; None, with a report, where the connection cannot go on."""
        try:
            request = REQUESTS.decode(line)
            if isinstance(request, Hello):
                self._welcome(request)
            elif self._record is None:
                raise WireError("a request before Hello")
        except WireError as error:
            self.report(Refused(id=-1, message=str(error)))
            return None
        return request

    def _welcome(self, hello: Hello) -> None:
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            raise WireError(
                f"Poseidon {__version__} is installed here, and the launcher is {hello.version}"
            )
        try:
            record = record_from_fields(hello.record)
        except (ValueError, KeyError, TypeError, PoseidonError) as error:
            raise WireError(f"the job's record cannot be read: {error}") from error
        if record.job != self._job:
            raise WireError(f"this agent is for job {self._job}, not {record.job}")
        self._silence_s, self._grace_s = hello.silence_s, hello.grace_s
        me = psutil.Process()
        launcher = RecordedProcess(
            name=AGENT, host=LOOPBACK, pid=me.pid, created_s=me.create_time()
        )
        self._record = replace(record, launcher=launcher, processes=())
        self._scratch = tempfile.mkdtemp(prefix="poseidon-")
        cores = len(me.cpu_affinity()) if hasattr(me, "cpu_affinity") else psutil.cpu_count() or 1
        self.report(
            Welcome(
                protocol=PROTOCOL,
                version=__version__,
                pid=me.pid,
                cores=cores,
                scratch=self._scratch,
            )
        )

    def _handle(self, request: Request) -> None:
        if isinstance(request, Start):
            self._start(request)
        elif (
            isinstance(request, SendLine) and (process := self._running.get(request.id)) is not None
        ):
            process.send_line(request.line.encode())
        elif (
            isinstance(request, SendSignal)
            and (process := self._running.get(request.id)) is not None
        ):
            if request.signal is ProcessSignal.KILL:
                process.kill()
            else:
                process.terminate()

    def _start(self, request: Start) -> None:
        if request.id in self._running:
            self._answer(Refused(id=request.id, message=f"process {request.id} was started before"))
            return
        program, *arguments = request.argv
        spec = ProcessSpec(
            name=request.name,
            argv=(sys.executable if program == OWN_INTERPRETER else program, *arguments),
            environment=request.environment,
            first_line=request.first_line.encode(),
            own_stdout=request.own_stdout,
        )
        here = Host(id=request.name.client, address=LOOPBACK, port=0)
        forwarder = _Forwarder(self, request.id)
        try:
            process = self._launcher.start(spec, here, forwarder)
        except JobError as error:
            self._answer(Refused(id=request.id, message=str(error)))
            return
        self._running[request.id] = process
        self._register(request.name, process)
        self._answer(Started(id=request.id, pid=process.pid, created_s=process.created_s))
        forwarder.started.set()

    def _register(self, name: ProcessName, process: LocalProcess) -> None:
        """Add a process to the host's record of the job, unless the record is the launcher's
        own.
        """
        assert self._record is not None
        added = RecordedProcess(
            name=name.describe(), host=LOOPBACK, pid=process.pid, created_s=process.created_s
        )
        self._record = replace(self._record, processes=(*self._record.processes, added))
        with suppress(PoseidonError):  # kill finds processes by the job's id, too
            there = self._registry.read(self._job)
            if there is None or there.launcher == self._record.launcher:
                self._registry.write(self._record)

    def _end_all(self) -> None:
        processes = [process for process in self._running.values() if process.poll() is None]
        for process in processes:
            process.terminate()
        deadline_s = time.monotonic() + self._grace_s
        while (
            any(process.poll() is None for process in processes) and time.monotonic() < deadline_s
        ):
            time.sleep(TICK_S / 4)
        for process in self._running.values():
            process.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        with suppress(PoseidonError):
            there = self._registry.read(self._job)
            if (
                there is not None
                and self._record is not None
                and there.launcher == self._record.launcher
            ):
                self._registry.remove(self._job)

    def report(self, report: Report, *, timeout_s: float = math.inf) -> bool:
        """Queue a report; wait while the channel is slow. Drop it, and return False,
        when the channel is lost or time is up.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._lost.is_set() and time.monotonic() < deadline_s:
            try:
                self._outbox.put(report, timeout=TICK_S)
            except queue.Full:
                continue
            return True
        return False

    def _answer(self, report: Report) -> None:
        """Queue a report from the loop, which has to check for the launcher's silence and for
        signals.
        """
        while not self._stopping.is_set() and not self.report(report, timeout_s=TICK_S):
            if self._lost.is_set() or time.monotonic() - self._received_s > self._silence_s:
                return

    def _thread(self, role: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - `serve` is the owner: it ends
                print(f"poseidon agent: {role}: {type(error).__name__}: {error}", file=sys.stderr)
                self._lost.set()

        return threading.Thread(target=run, name=f"poseidon agent {role}", daemon=True)

    def _end_reports(self) -> None:
        with suppress(queue.Full):  # a channel that takes nothing is lost
            self._outbox.put_nowait(None)

    def _receive(self) -> None:
        while not self._lost.is_set():
            line = self._channel.receive()
            while not self._lost.is_set():
                with suppress(queue.Full):
                    self._inbox.put(line, timeout=TICK_S)
                    break
            if line is None:
                return

    def _send(self) -> None:
        while not self._lost.is_set():
            try:
                report = self._outbox.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                report = Heartbeat()
            if report is None:
                return
            try:
                self._channel.send(REPORTS.encode(report))
            except OSError:
                self._lost.set()


class _Forwarder:
    """The listener of one process: forwards to the launcher, after `Started` was reported."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._id = number
        self.started = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._forward(EventReport(id=self._id, event=event))

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self._forward(OutputReport(id=self._id, stream=stream, text=text))

    def exited(self, name: ProcessName, status: int) -> None:
        self._forward(Exited(id=self._id, status=status))

    def _forward(self, report: Report) -> None:
        self.started.wait(HELLO_S)
        self._agent.report(report)


def serve(channel: LineChannel, job: str) -> int:
    """Serve as the agent of a job over a channel until it ends; return the exit code.

    Call it from the main thread: SIGTERM, SIGINT and SIGHUP end the agent and all it started; so
    does `USER_KILL`, which the agent reports to the launcher.
    """
    agent = Agent(channel, check_job_id(job), Registry(read_settings().state_folder))

    def stop(number: int, frame: FrameType | None) -> None:
        agent.stop(killed_by_user=number == USER_KILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, USER_KILL):
        if signal.getsignal(number) is not signal.SIG_IGN:  # our parent handles it in our place
            signal.signal(number, stop)
    return agent.serve()


def main(arguments: list[str] | None = None) -> int:
    """Serve a launcher over standard input and output; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.cluster.agent",
        description="A job's agent on a host; started over SSH.",
    )
    parser.add_argument("--job", required=True, help="the job's id")
    job = parser.parse_args(arguments).job
    # Nothing that this process prints may mix with the messages.
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        return serve(PipeLineChannel(inlet, outlet), job)
    except PoseidonError as error:
        print(f"poseidon agent: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
