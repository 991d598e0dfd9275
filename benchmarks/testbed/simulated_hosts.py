"""Agents of many hosts, and the processes that they start, which compute nothing: all that a
launcher sees of a job.

Law: one thread answers for all hosts, and counts its own processor time, so that what is left of
this process's is the launcher's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from poseidon.cluster.agent import messages as m
from poseidon.cluster.agent.messages import REPORTS, REQUESTS
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.channel import QueueChannel
from poseidon.cluster.dial.dialer import WITHIN_PROCESS, Dialer
from poseidon.cluster.host_probe import HostFacts
from poseidon.cluster.job_plan import Role
from poseidon.cluster.jobs.registry import JobRecord
from poseidon.cluster.jobs.this_host import HostJob, JobList, Killed
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import OutputStream, for_each_host
from poseidon.errors import JobError
from ps_server.json_fields import fields_of

MAX_PARALLEL = 64
Reports = Iterator[m.Report]


class SimulatedProcess:
    """A worker or a shard of an elastic job.

    Args:
        number: its id on the wire.
        role: of it.
        document: its first line.
        events: that a worker of the first start reports, of each of three kinds.
    """

    def __init__(self, number: int, role: Role, document: Mapping[str, Any], events: int) -> None:
        self.number = number
        self.role = role
        self.running = False
        self._document = document
        self._events = events
        self._snapshot: int | None = None

    def say(self, event: str, **fields: object) -> m.Report:
        """Return the report of an event."""
        return m.EventReport(id=self.number, event={"event": event, **fields})

    def begin(self) -> Reports:
        """Yield the reports of a process that starts or continues."""
        if self.role is Role.SHARD:
            address = f"tcp://10.9.{self.number >> 8}.{self.number & 255}:40000"
            yield self.say("listening", address=address, round=0)
        elif self._document["aside"]:
            self._snapshot, self._events = None, 0
            yield self.say("paused", snapshot=None)
        else:
            self._snapshot = max(0, self._document["rewind"])
            yield self.say("ready")

    def told(self, line: Mapping[str, Any]) -> Reports:
        """Yield the reports of a process that receives a line from the launcher."""
        do = line["do"]
        if do == "go_on":
            self._document = line["document"]
            yield from self.begin()
        elif do == "pause":
            yield from self.pause()
        elif do == "connect":
            yield from self._train()
        elif do == "stop" and self.role is Role.SHARD:
            yield m.Exited(id=self.number, status=0)

    def pause(self, *, regrouped: bool = False) -> Reports:
        """Yield what it reports when it pauses, once."""
        if self.role is Role.SHARD:
            yield self.say("paused", snapshot=None)
        elif self.running or not regrouped:
            yield self.say("paused", snapshot=self._snapshot, message="", regrouped=regrouped)
        self.running = False

    def finish(self) -> Reports:
        """Yield what a worker reports at its end."""
        yield self.say("done")
        yield m.Exited(id=self.number, status=0)

    def _train(self) -> Reports:
        assert self._snapshot is not None
        self._snapshot, self.running = self._snapshot + 1, True
        events, self._events = self._events, 0
        for number in range(events):
            text = f"a line of a script, number {number}\n"
            yield self.say("alive", still_s=0.0, steps=0, collections=number, collection="mean")
            yield self.say("progress", iteration=self._snapshot, max_iter=10**6, images=1, loss=1.0)
            yield m.OutputReport(id=self.number, stream=OutputStream.STDOUT, text=text)
        yield self.say("progress", iteration=self._snapshot + 1, max_iter=10**6, images=1, loss=1.0)


class SimulatedHosts(Dialer):
    """Simulated hosts of a job; see `Dialer`.

    Args:
        hosts: of the job.
        events: of each worker and kind, in the first start.
    """

    def __init__(self, hosts: Sequence[Host], events: int) -> None:
        self._events = events
        self.sent_bytes = 0
        """To all hosts so far."""
        self.processor_s = 0.0
        """Of the thread that answers."""
        self._asked = threading.Event()
        self._pairs = {host.id: QueueChannel.pair(self._asked.set) for host in hosts}
        self._open = dict(self._pairs)
        self._processes: dict[int, dict[int, SimulatedProcess]] = {host.id: {} for host in hosts}
        self._beats = dict.fromkeys(self._processes, 0)
        self._records: dict[int, JobRecord] = {}
        self._lost: list[int] = []
        self.agents: dict[int, RemoteAgent] = {}
        """By the hosts' ids."""
        self._thread = threading.Thread(target=self._run, name="simulated hosts", daemon=True)
        self._thread.start()

    def dial(self, hosts: Sequence[Host], job: str) -> Mapping[int, RemoteAgent | JobError]:
        """See `Dialer`."""
        agents = [
            RemoteAgent(self._pairs[host.id][0], host.address, WITHIN_PROCESS) for host in hosts
        ]
        outcomes = for_each_host(RemoteAgent.connect, agents, name="connect", limit=MAX_PARALLEL)
        for outcome in outcomes:
            if isinstance(outcome, JobError):
                raise outcome
        self.agents |= {host.id: agent for host, agent in zip(hosts, agents, strict=True)}
        return {host.id: self.agents[host.id] for host in hosts}

    def lose_processes(self, host: int) -> None:
        """Let the processes of a host be killed."""
        self._lost.append(host)
        self._asked.set()

    def close(self) -> None:
        """End all agents."""
        for _, there in self._pairs.values():
            there.close()
        self._asked.set()
        self._thread.join()

    def _run(self) -> None:
        while self._open:
            self._asked.wait(1.0)
            self._asked.clear()
            while self._lost:
                self._kill(self._lost.pop())
            for host, (_, end) in list(self._open.items()):
                while (encoded := end.poll()) is not None:
                    self.sent_bytes += len(encoded)
                    self._send(host, self._answer(host, REQUESTS.decode(encoded)))
                if end.closed:
                    del self._open[host]
            self.processor_s = time.thread_time()

    def _send(self, host: int, reports: Reports) -> None:
        with suppress(OSError):  # the launcher has closed it
            for report in reports:
                self._pairs[host][1].send(REPORTS.encode(report))
                self.processor_s = time.thread_time()

    def _kill(self, host: int) -> None:
        ended = [m.Exited(id=number, status=-9) for number in self._processes[host]]
        self._processes[host].clear()
        self._send(host, iter(ended))

    def _answer(self, host: int, request: m.Request) -> Reports:
        processes = self._processes[host]
        if isinstance(request, m.AgentHello):
            yield m.AgentWelcome(cores=8, scratch="/tmp/scratch")
        elif isinstance(request, m.Heartbeat):
            yield request
            self._beats[host] += 1
            if self._beats[host] % 2:  # the launcher sends one a second, a process half of one
                for process in processes.values():
                    yield process.say("alive", still_s=0.0)
        elif isinstance(request, m.Register):
            self._records[host] = request.record
        elif isinstance(request, m.Ask):
            yield m.Answer(id=request.id, answer=fields_of(self._served(host, request)))
        elif isinstance(request, m.EndAll):
            yield m.Answer(id=request.id, answer={})
        elif isinstance(request, m.StartProcess):
            name, document = request.spec.name, json.loads(request.spec.first_line)
            process = SimulatedProcess(request.id, name.role, document, self._events)
            processes[request.id] = process
            yield m.Started(id=request.id, pid=100 * host + request.id, created=f"boot {host}")
            yield from process.begin()
        elif isinstance(request, m.WriteLine) and request.id in processes:
            line = json.loads(request.line)
            if line["do"] in ("regroup", "stop") and processes[request.id].role is Role.WORKER:
                self._tell_workers(line["do"])
            else:
                yield from processes[request.id].told(line)
        elif isinstance(request, m.SendSignal) and processes.pop(request.id, None) is not None:
            yield m.Exited(id=request.id, status=-9)
        elif isinstance(request, m.Shutdown):
            self._pairs[host][1].close()

    def _tell_workers(self, do: str) -> None:
        """Let all workers do what one of them was asked to, and tells the others."""
        for host, processes in self._processes.items():
            for process in list(processes.values()):
                if process.role is Role.WORKER:
                    again = process.finish() if do == "stop" else process.pause(regrouped=True)
                    self._send(host, again)

    def _served(self, host: int, ask: m.Ask) -> object:
        if ask.service is m.Service.CHECK:
            clients: Any = ask.request["clients"]
            return HostFacts(
                torch="2.0",
                addresses={each["id"]: each["addresses"][0] for each in clients},
                problems=(),
            )
        if ask.service is m.Service.KILL:
            return Killed(counts=dict.fromkeys(ask.request["jobs"], 2))
        living = len(self._processes[host])
        record = self._records.get(host)
        jobs = () if record is None else (HostJob(record=record, launcher=True, living=living),)
        return JobList(jobs=jobs)
