"""The process that stands for a job's launcher on one host: `python -m poseidon.cluster.agent --job ID`.

It starts the job's processes there, passes on what they say, and puts the job on the host's own record, so that
`poseidon ps` and `poseidon kill` work there, too. It takes orders from its standard input; `serve` does the same over
any other line (`poseidon.cluster.agent.wire` has the words).

Law: no process of the job outlives the agent's line. When the line ends, breaks or falls silent, and on SIGTERM, all
are asked to end, then made to, and the agent goes. What the line brings reaches no shell and no path, save as the
argument list of a process that this user asked for.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import psutil

from poseidon import __version__
from poseidon.cluster.agent.line_channel import LineChannel, PipeLines
from poseidon.cluster.agent.wire import (
    OWN_INTERPRETER,
    PROTOCOL,
    Beat,
    Begun,
    Ended,
    Greet,
    Here,
    Leave,
    Order,
    Refused,
    Report,
    Send,
    Signal,
    SignalWord,
    Start,
    Told,
    Unwanted,
    WireError,
    Wrote,
    decode_order,
    encode_report,
)
from poseidon.cluster.jobs.kill import AGENT, UNWANTED
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
from poseidon.cluster.process import ProcessSpec
from poseidon.errors import JobError, PoseidonError
from poseidon.settings import read_settings

BEAT_S = 2.0
TICK_S = 0.2
GREETING_S = 60.0
"""How long a launcher may take to say who it is."""
LONGEST_PAUSE_S = 5.0
"""Later than this at its own work, and it was this machine that slept, not the launcher."""
MOST_WAITING = 10_000
HERE = "127.0.0.1"


class Agent:
    """One job's processes on this host.

    Args:
        channel: the line to the launcher.
        job: the job's id, which the greeting must name.
        registry: where this host's jobs are on record.
    """

    def __init__(self, channel: LineChannel, job: str, registry: Registry) -> None:
        self._channel = channel
        self._job = job
        self._registry = registry
        self._launcher = LocalLauncher()
        self._running: dict[int, LocalProcess] = {}
        self._record: JobRecord | None = None
        self._scratch = ""
        self._silence_s, self._grace_s = GREETING_S, 5.0
        self._inbox: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._outbox: queue.Queue[Report | None] = queue.Queue(MOST_WAITING)
        self._lost = threading.Event()
        self._leaving = threading.Event()
        self._unwanted = False

    def serve(self) -> int:
        """Obey until the line ends; returns the exit code, 0 when the launcher said so."""
        threads = [
            threading.Thread(target=self._receive, name="poseidon agent receive", daemon=True),
            threading.Thread(target=self._send, name="poseidon agent send", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            return self._obey_all()
        finally:
            if self._unwanted:  # before the first process ends, which would look like a loss
                self.report(Unwanted())
            self._end_all()
            self._outbox_ends()
            threads[1].join(BEAT_S)  # the last words
            self._lost.set()
            self._channel.close()
            threads[0].join(TICK_S)  # it may wait in a read that only the launcher's end of the line can end

    def leave(self, *, unwanted: bool = False) -> None:
        """End everything and return from `serve`. May be called from anywhere.

        Args:
            unwanted: the user wants the job gone, and the launcher is told so.
        """
        self._unwanted = self._unwanted or unwanted
        self._leaving.set()

    def _obey_all(self) -> int:
        heard_s = looked_s = time.monotonic()
        while not self._leaving.is_set() and not self._lost.is_set():
            line, now = self._next_line(), time.monotonic()
            if now - looked_s > LONGEST_PAUSE_S:
                heard_s += now - looked_s
            looked_s = now
            if line == b"":
                if now - heard_s > self._silence_s:
                    return 1
                continue
            heard_s = now
            if line is None:
                return 1
            order = self._decode(line)
            if order is None:
                return 1
            if isinstance(order, Leave):
                return 0
            self._obey(order)
        return 1

    def _next_line(self) -> bytes | None:
        """The next line, None when there will be none, empty when there is none yet."""
        try:
            return self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return b""

    def _decode(self, line: bytes) -> Order | None:
        """The order in a line; None, with a word to the launcher, when nothing sensible can follow it."""
        try:
            order = decode_order(line)
            if isinstance(order, Greet):
                self._greet(order)
            elif self._record is None:
                raise WireError("an order before the greeting")
        except WireError as error:
            self.report(Refused(id=-1, message=str(error)))
            return None
        return order

    def _greet(self, order: Greet) -> None:
        if (order.protocol, order.version) != (PROTOCOL, __version__):
            raise WireError(f"Poseidon {__version__} is installed here, and the launcher is {order.version}")
        try:
            record = record_from_fields(order.record)
        except (ValueError, KeyError, TypeError, PoseidonError) as error:
            raise WireError(f"the job's record cannot be read: {error}") from error
        if record.job != self._job:
            raise WireError(f"this agent is for job {self._job}, not {record.job}")
        self._silence_s, self._grace_s = order.silence_s, order.grace_s
        me = psutil.Process()
        launcher = RecordedProcess(name=AGENT, host=HERE, pid=me.pid, created_s=me.create_time())
        self._record = replace(record, launcher=launcher, processes=())
        self._scratch = tempfile.mkdtemp(prefix="poseidon-")
        cores = len(me.cpu_affinity()) if hasattr(me, "cpu_affinity") else psutil.cpu_count() or 1
        self.report(
            Here(protocol=PROTOCOL, version=__version__, pid=me.pid, cores=cores, scratch=self._scratch)
        )

    def _obey(self, order: Order) -> None:
        if isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Send) and (process := self._running.get(order.id)) is not None:
            process.send_line(order.line.encode())
        elif isinstance(order, Signal) and (process := self._running.get(order.id)) is not None:
            if order.signal is SignalWord.KILL:
                process.kill()
            else:
                process.terminate()

    def _start(self, order: Start) -> None:
        if order.id in self._running:
            self.report(Refused(id=order.id, message=f"process {order.id} was started before"))
            return
        program, *arguments = order.argv
        spec = ProcessSpec(
            name=order.name,
            argv=(sys.executable if program == OWN_INTERPRETER else program, *arguments),
            environment=order.environment,
            first_line=order.first_line.encode(),
        )
        here = Host(id=order.name.client, address=HERE, port=0)
        voice = _Voice(self, order.id)
        try:
            process = self._launcher.start(spec, here, voice)
        except JobError as error:
            self.report(Refused(id=order.id, message=str(error)))
            return
        self._running[order.id] = process
        self._put_on_record(order.name, process)
        self.report(Begun(id=order.id, pid=process.pid, created_s=process.created_s))
        voice.started.set()

    def _put_on_record(self, name: ProcessName, process: LocalProcess) -> None:
        """Add to the host's record of the job, unless another's is there: that of the launcher itself."""
        assert self._record is not None
        added = RecordedProcess(name=name.describe(), host=HERE, pid=process.pid, created_s=process.created_s)
        self._record = replace(self._record, processes=(*self._record.processes, added))
        with suppress(PoseidonError):  # a record is a help to find what carries the job's id anyway
            there = self._registry.read(self._job)
            if there is None or there.launcher == self._record.launcher:
                self._registry.write(self._record)

    def _end_all(self) -> None:
        processes = [process for process in self._running.values() if process.poll() is None]
        for process in processes:
            process.terminate()
        deadline_s = time.monotonic() + self._grace_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
            time.sleep(TICK_S / 4)
        for process in self._running.values():
            process.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        with suppress(PoseidonError):
            there = self._registry.read(self._job)
            if there is not None and self._record is not None and there.launcher == self._record.launcher:
                self._registry.remove(self._job)

    def report(self, report: Report) -> None:
        """Queue a report; waits while the line is slow, and drops it once the line has gone."""
        while not self._lost.is_set():
            try:
                self._outbox.put(report, timeout=TICK_S)
            except queue.Full:
                continue
            return

    def _outbox_ends(self) -> None:
        with suppress(queue.Full):  # a line that takes nothing takes no last words either
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
                report = self._outbox.get(timeout=BEAT_S)
            except queue.Empty:
                report = Beat()
            if report is None:
                return
            try:
                self._channel.send(encode_report(report))
            except OSError:
                self._lost.set()


class _Voice:
    """The listener of one process: its words go to the launcher, after the news that it was started."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._id = number
        self.started = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        self._say(Told(id=self._id, event=event))

    def log(self, name: ProcessName, line: str) -> None:
        self._say(Wrote(id=self._id, line=line))

    def exited(self, name: ProcessName, status: int) -> None:
        self._say(Ended(id=self._id, status=status))

    def _say(self, report: Report) -> None:
        self.started.wait(GREETING_S)
        self._agent.report(report)


def serve(channel: LineChannel, job: str) -> int:
    """Be the agent of a job over a line, until it ends; returns the exit code.

    Call it from the main thread: SIGTERM, SIGINT and SIGHUP end the agent and all it started; so does `UNWANTED`, of which the
    launcher hears.
    """
    agent = Agent(channel, check_job_id(job), Registry(read_settings().state_folder))

    def leave(number: int, frame: FrameType | None) -> None:
        agent.leave(unwanted=number == UNWANTED)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, UNWANTED):
        if signal.getsignal(number) is not signal.SIG_IGN:  # whoever started us takes them in our place
            signal.signal(number, leave)
    return agent.serve()


def main(arguments: list[str] | None = None) -> int:
    """Serve a launcher over standard input and output; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poseidon.cluster.agent", description="A job's agent on a host; started over SSH."
    )
    parser.add_argument("--job", required=True, help="the job's id")
    job = parser.parse_args(arguments).job
    # What anything in this process prints must not mix with the talk.
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        return serve(PipeLines(inlet, outlet), job)
    except PoseidonError as error:
        print(f"poseidon agent: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
