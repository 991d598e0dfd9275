#!/usr/bin/env python3
"""Measure what a launcher needs for jobs of many hosts.

    python benchmarks/many_hosts.py
    python benchmarks/many_hosts.py --hosts 4,1000 --events 20
    python benchmarks/many_hosts.py --ssh 64     # agents that sshd of this machine starts

A row is one job, run by the whole launcher: checks, record, log, statistics, encrypted. Every host
is simulated in this process, with a worker and a shard. One thread answers for all, and its
processor time is not counted.

    ready     seconds until all workers are connected with all shards
    core-ms   processor time of the launcher until then, for a host, in milliseconds
    sent      what it has sent until then, for a host, in KiB
    MiB       memory of the launcher with all hosts connected, for a host
    threads   of the launcher, for a host
    events    heartbeats, progress events and lines that it takes, in a second of a core

and its processor time, in seconds,

    ps, kill  until `poseidon ps` has all answers, and `poseidon kill`
    loss      from the death of a host's processes until the others go on
    rejoin    from there until the host takes part again
    end       from a request to stop to the end of all processes
    logs      in which `poseidon logs` shows the lines of all workers

With --ssh the hosts are connections of their own to this machine's sshd, with an agent each. Their
workers and shards are scripts of the shell. Such a job is not elastic, and is ended by a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

import psutil

from benchmarks.testbed.simulated_hosts import SimulatedHosts
from poseidon.base.text_files import OutputLine
from poseidon.cli import main as cli
from poseidon.cluster.dial.ssh import SshDialer
from poseidon.cluster.job_plan import ProcessName, ShardPlan, WorkerPlan
from poseidon.cluster.jobs.kill import KillTimeouts
from poseidon.cluster.jobs.remote_hosts import SshAgents, kill_remote_jobs, list_remote_jobs
from poseidon.cluster.jobs.this_host import KillRequest
from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.process import OutputStream, ProcessSpec
from poseidon.cluster.supervision.background import StartReport
from poseidon.cluster.supervision.loop import JobListener
from poseidon.engine.document import JobDocument, WorkKind
from poseidon.errors import JobError
from poseidon.launcher import runner
from poseidon.launcher.job import Job
from poseidon.launcher.listeners import Listeners
from poseidon.launcher.processes import Start
from poseidon.launcher.request import JobRequest
from poseidon.launcher.site import Site, launcher_environment
from ps_server.json_fields import fields_of
from tests.support.loopback_sshd import LoopbackSshd

HOSTS = (4, 16, 64, 256, 1000)
COLUMNS = {
    "ready": ".2f",
    "core-ms": ".1f",
    "sent": ".1f",
    "MiB": ".2f",
    "threads": ".1f",
    "events": ".0f",
    "ps": ".2f",
    "kill": ".2f",
    "loss": ".2f",
    "rejoin": ".2f",
    "end": ".2f",
    "logs": ".2f",
}


class ElasticJob(Job):
    """A job whose processes compute nothing."""

    kind = WorkKind.SOLVER
    restarts_by_itself = True
    fixed_because = ""

    def document(self, role: WorkerPlan, start: Start) -> JobDocument:
        """See `Job`."""
        document = replace(self.worker_document(role, start), copies=1)
        return JobDocument(**fields_of(document), solver="solver.prototxt")

    def import_ahead(self) -> Sequence[threading.Event]:
        """See `Job`."""
        return ()

    def shares_data(self) -> bool:
        """See `Job`."""
        return True


SHARD = """
read -r document
echo '{"event": "listening", "address": "tcp://127.0.0.1:9", "round": 0}'
read -r line
"""
WORKER = """
read -r document
echo '{"event": "ready"}'
while read -r line; do :; done
"""


class ShellJob(ElasticJob):
    """A job of scripts of the shell, which say that they are ready."""

    fixed_because = "its processes have no memory"

    def spec(self, role: WorkerPlan | ShardPlan, start: Start) -> ProcessSpec:
        """See `Job`."""
        script = SHARD if isinstance(role, ShardPlan) else WORKER
        return replace(super().spec(role, start), argv=("bash", "-c", script), imports=())


class Course(JobListener):
    """Notes when what has happened, and lets the next thing happen.

    Args:
        hosts: of the job.
        simulated: the hosts.
        events: of each worker, until nothing more comes by itself.
    """

    def __init__(self, hosts: Sequence[Host], simulated: SimulatedHosts, events: int) -> None:
        self._hosts = hosts
        self._simulated = simulated
        self._events = events
        self._memory = psutil.Process().memory_info().rss
        self._threads = threading.active_count()
        self._processor_s = self._own_s()
        self._starts = self._heard = 0
        self._began_s, self._since_s = time.perf_counter(), self._processor_s
        self.found: dict[str, float] = {}

    def on_started(self) -> None:
        """Handle the start, and those that go on."""
        count = len(self._hosts)
        name = ("ready", "loss", "rejoin")[self._starts]
        self._starts += 1
        used_s = self._used_s()
        self.found[name] = time.perf_counter() - self._began_s if name == "ready" else used_s
        if name == "ready":
            self.found["core-ms"] = 1e3 * used_s / count
            self.found["sent"] = self._simulated.sent_bytes / 1024 / count
            memory = psutil.Process().memory_info().rss - self._memory
            self.found["MiB"] = memory / 2**20 / count
            self.found["threads"] = (threading.active_count() - self._threads) / count
        elif name == "rejoin":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Count what workers report."""
        if event["event"] == "progress" or "collections" in event:
            self._count()

    def on_log(self, name: ProcessName, stream: OutputStream, line: OutputLine) -> None:
        """Count lines."""
        self._count()

    def ended(self) -> None:
        """Note the end of the job."""
        self.found["end"] = self._used_s()

    def logged(self) -> None:
        """Note that the log was shown."""
        self.found["logs"] = self._used_s()

    def _count(self) -> None:
        if self._heard < self._events:
            self._heard += 1
            if self._heard == self._events:
                self.found["events"] = self._events / self._used_s()
                self._ask()

    def _ask(self) -> None:
        agent_of = lambda host: self._simulated.agents[host.id]  # noqa: E731
        jobs, problems = list_remote_jobs(self._hosts, agent_of)
        assert len(jobs) == len(self._hosts) and not problems, problems[:3]
        self.found["ps"] = self._used_s()
        kill = KillRequest(jobs=("another",), timeouts=KillTimeouts())
        counts, problems = kill_remote_jobs(kill, self._hosts, agent_of)
        assert len(counts) == len(self._hosts) and not problems
        self.found["kill"] = self._used_s()
        self._simulated.lose_processes(self._hosts[-1].id)

    def _used_s(self) -> float:
        since_s, self._since_s = self._since_s, self._own_s()
        return self._since_s - since_s

    def _own_s(self) -> float:
        return time.process_time() - self._simulated.processor_s


def measure(count: int, events: int, folder: Path) -> Mapping[str, float]:
    """Run a job on so many hosts; return its row."""
    hosts = [Host(id=i, address=f"10.{i >> 8}.{i & 255}.1", port=9000) for i in range(count)]
    simulated = SimulatedHosts(hosts, events)
    output = folder / "out"
    request = JobRequest(output=output, max_restarts=1, max_rejoins=1)
    job = ElasticJob(request, Site(hosts, simulated), title="many", stem="many", devices=("cpu",))
    course = Course(hosts, simulated, count * (3 * events + 1))
    run(job, course)
    course.ended()
    with contextlib.redirect_stdout(io.StringIO()) as lines:
        cli.main(["logs", str(output)])
    shown = lines.getvalue().count("\n")
    assert shown == count * events, f"{shown} of {count * events} lines"
    course.logged()
    return course.found


def run(job: Job, course: JobListener) -> None:
    """Run a job, and let a listener of ours hear of it."""
    every = runner.Listeners
    runner.Listeners = lambda *listeners: Listeners(*listeners, course)  # type: ignore[misc,assignment]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runner.run(job, StartReport(None))
    except BaseException as error:
        if not isinstance(error, JobError):
            print(said.getvalue()[-2000:], file=sys.stderr)
        raise
    finally:
        runner.Listeners = every  # type: ignore[misc]


class SshCourse(JobListener):
    """Notes when all hosts are ready, asks for their jobs, and ends them.

    Args:
        hosts: of the job.
        settings: of the connections.
    """

    def __init__(self, hosts: Sequence[Host], settings: SshSettings) -> None:
        self._hosts = hosts
        self._settings = settings
        self._memory = psutil.Process().memory_info().rss
        self._threads = threading.active_count()
        self._began_s, self._processor_s = time.perf_counter(), time.process_time()
        self.found: dict[str, float] = {}

    def on_started(self) -> None:
        """Handle the start."""
        count, found = len(self._hosts), self.found
        found["ready"] = time.perf_counter() - self._began_s
        found["core-ms"] = 1e3 * (time.process_time() - self._processor_s) / count
        found["MiB"] = (psutil.Process().memory_info().rss - self._memory) / 2**20 / count
        found["threads"] = (threading.active_count() - self._threads) / count
        self._since_s = time.process_time()
        with SshAgents(self._settings, launcher_environment()) as agents:
            jobs, problems = list_remote_jobs(self._hosts, agents)
            assert jobs and not problems, problems[:3]
            found["ps"] = time.process_time() - self._since_s
        self._since_s = time.process_time()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    def ended(self) -> None:
        """Note the end of the job."""
        self.found["end"] = time.process_time() - self._since_s


def measure_ssh(count: int, folder: Path) -> Mapping[str, float]:
    """Run a job on so many connections to sshd; return its row."""
    with sshd_of(count, folder) as (config, ports):
        hosts = [
            Host(id=i, address="127.0.0.1", port=0, user=getpass.getuser(), ssh_port=port)
            for i, port in enumerate(ports)
        ]
        settings = SshSettings(config=config)
        site = Site(hosts, SshDialer(settings, launcher_environment()))
        request = JobRequest(output=folder / "out", max_restarts=0)
        job = ShellJob(request, site, title="ssh", stem="ssh", devices=("cpu",))
        course = SshCourse(hosts, settings)
        with suppress(JobError):  # the kill
            run(job, course)
        course.ended()
    if "ready" not in course.found:
        raise SystemExit("the job has not started")
    return course.found


@contextlib.contextmanager
def sshd_of(count: int, folder: Path) -> Iterator[tuple[Path, Sequence[int]]]:
    """Serve SSH on so many ports; give the client's configuration, and the ports."""
    sshd = LoopbackSshd(folder)
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=count) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    sshd.known_hosts.write_text("".join(f"[127.0.0.1]:{p} {sshd.host_key}\n" for p in ports))
    ended = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as selector:
            for listener in listeners:
                selector.register(listener, selectors.EVENT_READ)
            while not ended.is_set():
                for key, _ in selector.select(0.2):
                    line, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    with line:
                        sshd.serve(line)

    thread = threading.Thread(target=serve, name="sshd ports")
    thread.start()
    try:
        yield sshd.config, ports
    finally:
        ended.set()
        thread.join()
        for listener in listeners:
            listener.close()
        sshd.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of hosts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="of a job")
    parser.add_argument("--events", type=int, default=7, help="of each worker and kind (7)")
    parser.add_argument("--ssh", help="numbers of hosts that sshd of this machine serves")
    flags = parser.parse_args(arguments)
    print(f"{'hosts':>6}" + "".join(f"{name:>9}" for name in COLUMNS))
    for count in map(int, (flags.ssh or flags.hosts).split(",")):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["POSEIDON_HOME"] = str(Path(folder, "home"))
            found = (
                measure_ssh(count, Path(folder))
                if flags.ssh
                else measure(count, flags.events, Path(folder))
            )
        cells = [cell(found.get(name), how) for name, how in COLUMNS.items()]
        print(f"{count:>6}" + "".join(cells), flush=True)


def cell(value: float | None, how: str) -> str:
    """Return a figure in the width of its column; blanks: it was not measured."""
    return " " * 9 if value is None else f"{value:>9{how}}"


if __name__ == "__main__":
    main()
