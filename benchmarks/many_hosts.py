#!/usr/bin/env python3
"""Measure what a launcher needs for jobs of many hosts.

    python benchmarks/many_hosts.py
    python benchmarks/many_hosts.py --hosts 4,1000 --events 20

Every host is simulated within this process: one thread answers for all agents, and its processor
time is not counted. All else is the launcher of every job: the agents' connections, the keys and
documents of a worker and a shard on each host, the loop, the record on disk. A row is one job:

    ready     seconds until all workers are connected with all shards
    core-ms   processor time of the launcher until then, for a host, in milliseconds
    sent      what it has sent until then, for a host, in KiB
    MiB       memory of the launcher with all hosts connected, for a host
    events    events of workers that its loop takes, in a second
    end       seconds from the last event to the end of all processes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

import psutil

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.agent.wire import REPORTS, REQUESTS
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.job_plan import JobPlan, ProcessName, Role, ShardPlan, WorkerPlan, plan_job
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess, Registration, Registry
from poseidon.cluster.machinefile import Host
from poseidon.cluster.parallel import for_each_host
from poseidon.cluster.process import Listener, ProcessSpec, RunningProcess
from poseidon.cluster.supervision.loop import JobListener, run_job
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import SupervisionSettings
from poseidon.engine.document import JobDocument, WorkKind
from poseidon.launcher.processes import Start, shard_spec, worker_spec
from poseidon.launcher.request import Encrypt

HOSTS = (4, 16, 64, 256, 1000)
IDLE_S = 0.001


class SimulatedHosts:
    """Agents of many hosts, which one thread answers for, and their `Launcher`.

    Args:
        hosts: of the job.
        events: of each worker, from its connection to its end.
    """

    def __init__(self, hosts: Sequence[Host], events: int) -> None:
        self._events = events
        self.sent_bytes = 0
        self.processor_s = 0.0
        """Of the thread that answers."""
        self._asked = threading.Event()
        pairs = [QueueChannel.pair(self._asked.set) for _ in hosts]
        self._ends = [there for _, there in pairs]
        self._roles: dict[tuple[int, int], str] = {}
        self._thread = threading.Thread(target=self._run, name="simulated hosts", daemon=True)
        self._thread.start()
        self.agents = {
            host.id: RemoteAgent(here, host.address)
            for host, (here, _) in zip(hosts, pairs, strict=True)
        }
        for_each_host(RemoteAgent.connect, list(self.agents.values()), name="connect", limit=64)

    def start(self, spec: ProcessSpec, host: Host, listener: Listener) -> RunningProcess:
        """See `Launcher.start`."""
        return self.agents[host.id].begin_start(spec, listener)

    def close(self) -> None:
        """End all agents."""
        for end in self._ends:
            end.close()
        self._asked.set()
        self._thread.join()

    def _run(self) -> None:
        open_ends = dict(enumerate(self._ends))
        while open_ends:
            self._asked.wait(1.0)
            self._asked.clear()
            for number, end in list(open_ends.items()):
                while (encoded := end.poll()) is not None:
                    self.sent_bytes += len(encoded)
                    with suppress(OSError):  # the launcher has closed it
                        for report in self._answer(number, REQUESTS.decode(encoded)):
                            end.send(REPORTS.encode(report))
                if end.closed:
                    del open_ends[number]
            self.processor_s = time.thread_time()

    def _answer(self, host: int, request: m.Request) -> list[m.Report]:
        if isinstance(request, m.Hello):
            return [m.Welcome(cores=8, scratch="/tmp/scratch")]
        if isinstance(request, m.Start):
            role = "shard" if request.spec.name.role is Role.SHARD else "worker"
            self._roles[host, request.id] = role
            event: dict[str, Any] = {"event": "ready"}
            if role == "shard":
                address = f"tcp://10.{host >> 8}.{host & 255}.1:{40000 + request.id}"
                event = {"event": "listening", "address": address}
            started = m.Started(id=request.id, pid=10 + host, created=f"boot {host}")
            return [started, m.EventReport(id=request.id, event=event)]
        if isinstance(request, m.SendLine):
            return self._told(host, request.id, json.loads(request.line)["do"])
        if isinstance(request, m.Heartbeat):
            return [request]
        if isinstance(request, m.SendSignal):
            return [m.Exited(id=request.id, status=-9)]
        return []

    def _told(self, host: int, process: int, command: str) -> list[m.Report]:
        if self._roles[host, process] == "shard":
            return [m.Exited(id=process, status=0)] if command == "stop" else []
        if command != "connect":
            return []
        events: list[dict[str, Any]] = [
            {"event": "progress", "iteration": i, "max_iter": 10**6, "images": i, "loss": 1.0}
            for i in range(self._events)
        ]
        reports = [m.EventReport(id=process, event=e) for e in (*events, {"event": "done"})]
        return [*reports, m.Exited(id=process, status=0)]


class Course(JobListener):
    """When what has happened."""

    def __init__(self) -> None:
        self.started_s = self.last_s = 0.0
        self.processor_s = 0.0
        self.events = 0

    def on_started(self) -> None:
        self.started_s, self.processor_s = time.perf_counter(), time.process_time()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event["event"] == "progress":
            self.last_s = time.perf_counter()
            self.events += 1


def spec_of(plan: JobPlan, start: Start, role: WorkerPlan | ShardPlan) -> ProcessSpec:
    """Return how a job of `poseidon train` starts a process."""
    if isinstance(role, ShardPlan):
        return shard_spec(
            role, start, "many", WorkKind.SOLVER, workers=plan.working_hosts, threads=1, trace=""
        )
    document = JobDocument(
        job="many",
        output="/tmp/out",
        solver="solver.prototxt",
        rank=role.rank,
        workers=plan.worker_count,
        client=role.position,
        clients=plan.working_hosts,
        token=start.token,
        keys=start.keyring(role),
        shards=plan.shard_count,
        host=role.host.address,
    )
    return worker_spec(role, document)


def measure(count: int, events: int, folder: Path) -> str:
    """Run a job on so many hosts; return its row."""
    hosts = [Host(id=i, address=f"10.{i >> 8}.{i & 255}.1", port=9000) for i in range(count)]
    plan = plan_job(hosts, devices_per_host=("cpu",), channels=1)
    memory = psutil.Process().memory_info().rss
    began_s, began_processor_s = time.perf_counter(), time.process_time()
    simulated = SimulatedHosts(hosts, events)
    try:
        point = StartingPoint()
        start = Start.new(0, point, plan, Encrypt.ON)
        record = JobRecord(
            job="many",
            launcher=RecordedProcess(name="the launcher", host="h", pid=1, created="1"),
            hostfile=None,
            hosts=plan.hosts,
            output="/tmp/out",
            started_s=0.0,
        )
        course = Course()
        settings = SupervisionSettings()
        with SignalRequests(settings) as requests:
            run_job(
                plan,
                lambda role: spec_of(plan, start, role),
                simulated,
                listener=course,
                settings=settings,
                registration=Registration(Registry(folder), record),
                requests=requests,
            )
        ended_s = time.perf_counter()
        used = psutil.Process().memory_info().rss - memory
        core_s = course.processor_s - began_processor_s - simulated.processor_s
    finally:
        simulated.close()
    taken_s = max(1e-9, course.last_s - course.started_s)
    return (
        f"{count:>6}{course.started_s - began_s:>8.2f}{1e3 * core_s / count:>9.1f}"
        f"{simulated.sent_bytes / 1024 / count:>8.1f}{used / 2**20 / count:>7.2f}"
        f"{course.events / taken_s:>9.0f}{ended_s - course.last_s:>7.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each number of hosts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default=",".join(map(str, HOSTS)), help="of a job")
    parser.add_argument("--events", type=int, default=20, help="progress events a worker (20)")
    flags = parser.parse_args(arguments)
    print(f"{'hosts':>6}{'ready':>8}{'core-ms':>9}{'sent':>8}{'MiB':>7}{'events':>9}{'end':>7}")
    for count in map(int, flags.hosts.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(count, flags.events, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
