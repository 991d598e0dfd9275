"""A whole job: launcher, agents, restarts, shards and workers with snapshots, while processes,
hosts, links and disks fail.

Checked: the job ends; with the bits and the iteration of the undisturbed run wherever it has
finished; with an error only where the user has asked for its end, or it was disturbed before it had
started. What the user has killed does not start again, and a launcher that was stopped for a moment
starts nothing again. No process outlives the job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from poseidon.cluster.job_plan import ProcessName, Role, plan_job
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.supervision.loop import JobListener, run_job
from poseidon.cluster.supervision.restarts import RestartedJob, Restarts, StartingPoint
from poseidon.cluster.supervision.state import (
    JobResult,
    Outcome,
    SignalEffect,
    SignalReceived,
    SupervisionSettings,
)
from poseidon.errors import JobError
from poseidon.launcher.site import Site
from ps_server.errors import PeerLost, ServerError
from ps_server.protocol import messages as m
from ps_server.protocol.settings import Rule, StoreSpec, TableSpec
from ps_server.server import Server
from tests.simulation.client import SimulatedWorker, Waits, serve_shard
from tests.simulation.cluster import FAULTS, Cluster, ClusterDialer, draw_duration, hosts_of
from tests.simulation.hosts import JobProcess
from tests.simulation.processes import Question
from tests.simulation.world import Violation, World

SETTINGS = 37
LIMIT_S = 6000.0
START_S = 180.0
WAIT_S = 600.0
STALL_S = 14.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is made of, besides its deviations."""

    hosts: int
    workers: int
    exchanges: int
    """Of addresses: stores that the workers open one after the other."""
    iterations: int
    snapshot: int


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"job {number}")
    return Settings(
        hosts=random.choice((1, 2, 2, 3)),
        workers=random.choice((1, 1, 2)),
        exchanges=random.choice((1, 1, 2)),
        iterations=random.choice((4, 8)),
        snapshot=random.choice((2, 3)),
    )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Values and histories of all tables, as a disk has them."""

    content: bytes
    digest: str


class Job(Cluster):
    """One job, and the world around it."""

    def __init__(self, world: World, settings: Settings) -> None:
        super().__init__(world, settings.hosts)
        self.settings = settings
        self.disk: dict[str, Snapshot] = {}
        self.written: dict[int, str] = {}
        self.finals: dict[int, bytes] = {}
        self.requests: list[SignalReceived] = []
        self.starts = 0
        hosts = hosts_of(settings.hosts)
        self.plan = plan_job(hosts, devices_per_host=("cpu",) * settings.workers, channels=1)
        self.site = Site(hosts, ClusterDialer(self))

    def stores(self) -> list[StoreSpec]:
        """Return the stores that the workers open."""
        tables = (TableSpec(name="w", size=6, rows=2, rule=Rule(momentum=0.9)),)
        return [
            StoreSpec(workers=self.plan.worker_count, shards=self.plan.shard_count, tables=tables)
        ] * self.settings.exchanges

    def run(self) -> RestartedJob | JobError:
        """Run the job to its end."""
        with self.primitives.installed():
            try:
                return Restarts(_Driver(self), 50, START_S).run()
            except JobError as error:
                return error
            finally:
                self.site.close()

    def ask_to_stop(self, within_s: float | None) -> None:
        """See `Cluster`."""
        self.requests.append(SignalReceived(effect=SignalEffect.STOP, within_s=within_s))

    def spawn(self, process: JobProcess, spec: ProcessSpec) -> None:
        """See `Cluster`."""
        process.beat()
        if spec.name.role is Role.SHARD:
            _Shard(self, process, spec.name.index)
        else:
            point = StartingPoint(**json.loads(spec.first_line))
            process.task(_Work(self, process, spec.name.index, point).run())


_NO_RECORD: Any = SimpleNamespace(add=lambda *_: None, keep=lambda _: None)


class _Driver(JobListener):
    """See `RestartDriver`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        job = self._job
        job.finals = {}
        job.starts += 1
        try:
            job.site.begin(None)
            if any(agent.lost is not None for agent in job.killed) and not job.cut_off:
                raise Violation("the job starts again, though the user has killed it")
            first_line = json.dumps({"state": point.state, "iteration": point.iteration})
            return run_job(
                job.plan,
                lambda role: ProcessSpec(
                    name=role.process, argv=("program",), first_line=first_line.encode()
                ),
                job.site.start,
                listener=self,
                settings=SupervisionSettings(stall_timeout_s=STALL_S),
                registration=_NO_RECORD,
                requests=self,  # type: ignore[arg-type]
            )
        finally:
            job.site.end()

    def take(self) -> list[SignalReceived]:
        """As `SignalRequests` does."""
        taken, self._job.requests = self._job.requests, []
        return taken

    def on_started(self) -> None:
        self._job.started = True

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        if event["event"] == "snapshot":
            self._job.written[int(str(event["iteration"]))] = str(event["state"])

    def memory_point(self) -> None:
        """See `RestartDriver`: no process pauses."""

    def end_paused(self) -> None:
        """See `RestartDriver`: no process pauses."""

    def how_to_restart(self) -> str:
        return ""

    def from_disk_because(self) -> str:
        return ""

    def starting_point(self) -> StartingPoint:
        job = self._job
        for iteration, name in sorted(job.written.items(), reverse=True):
            found = job.disk.get(name)
            if found and hashlib.sha256(found.content).hexdigest() == found.digest:
                return StartingPoint(state=name, iteration=iteration)
        return StartingPoint()

    def drop_missing_hosts(self) -> str:
        return ""

    def report(self, text: str) -> None:
        pass

    def now(self) -> float:
        return self._job.world.now

    def pause(self, seconds: float) -> bool:
        self._job.primitives.wait(lambda: self._job.requests, seconds)
        return any(request.effect is SignalEffect.STOP for request in self.take())


class _Shard:
    """The process of a shard: it listens for each exchange of addresses, and stops when told."""

    def __init__(self, job: Job, process: JobProcess, index: int) -> None:
        self._job = job
        self._process = process
        self._index = index
        self._servers: list[Server] = []
        process.task(self._begin())
        process.on_command = self._obey

    def _begin(self) -> Waits:
        yield 0.5
        self._listen(0)
        self._obey()

    def _listen(self, number: int) -> None:
        name = f"{self._process.name} round {number}"
        server = serve_shard(
            self._job.fabric, self._process, self._index, self._job.plan.worker_count, name=name
        )
        self._servers.append(server)
        self._process.emit({"event": "listening", "address": name, "round": number})

    def _obey(self) -> None:
        for command in self._process.commands if self._servers else ():
            if command["do"] == "listen":
                self._listen(int(str(command["round"])))
            elif command["do"] == "stop":
                self._process.exit(0)
        if self._servers:
            self._process.commands.clear()


class _Work:
    """The process of a worker."""

    def __init__(self, job: Job, process: JobProcess, rank: int, point: StartingPoint) -> None:
        self._job = job
        self._process = process
        self._rank = rank
        self._point = point
        self._stores = job.stores()
        self._random = job.world.stream(f"work of {process.name}")
        self._clients: list[SimulatedWorker] = []
        self._values = [np.zeros(store.tables[0].size, np.float32) for store in self._stores]
        self._obeyed = self._writing = 0

    def run(self) -> Waits:
        """Work until the end; report an error as a worker does."""
        process = self._process
        try:
            yield 1.0 + self._random.random()
            process.emit({"event": "ready"})
            saved = self._load()
            for number in range(len(self._stores)):
                yield from self._connect(number, saved)
            yield from self._train()
            yield Question(lambda: True if not self._writing else None, "its snapshots", WAIT_S)
            for client in self._clients:
                yield from client.gather(b"")
                yield from client.close()
        except ServerError as error:
            lost = isinstance(error, PeerLost)
            event = {"event": "error", "message": str(error), "exit_code": 1, "peer_lost": lost}
            process.emit(event)
            yield 0.1
            process.exit(1)
            return
        process.emit({"event": "done"})
        yield 0.1
        process.exit(0)

    def _load(self) -> list[list[m.Array]]:
        if not self._point.state:
            first = np.linspace(-1, 1, 6, dtype=np.float32)
            return [[first, np.zeros(6, np.float32)] for _ in self._stores]
        content = self._job.disk[self._point.state].content
        arrays = np.frombuffer(content, np.float32).reshape(len(self._stores), 2, 6)
        return [[part.copy() for part in pair] for pair in arrays]

    def _connect(self, number: int, saved: list[list[m.Array]]) -> Waits:
        process = self._process
        if number:
            process.emit({"event": "connecting", "round": number})

        def addresses() -> list[str] | None:
            for command in process.commands:
                if command["do"] == "connect" and command["round"] == number:
                    return [str(address) for address in command["addresses"]]  # type: ignore[attr-defined]
            return None

        shards = yield Question(addresses, f"the addresses of round {number}", START_S)
        store = self._stores[number]
        store = StoreSpec(
            workers=store.workers,
            shards=store.shards,
            tables=store.tables,
            start_clock=self._point.iteration,
        )
        client = SimulatedWorker(
            self._job.fabric, process, self._rank, store, shards, name=f"{process.name} {number}"
        )
        client.timeout_s = WAIT_S  # as the default: longer than the launcher waits for a heartbeat
        self._clients.append(client)
        yield from client.start(lambda table: saved[number])

    def _train(self) -> Waits:
        settings, process = self._job.settings, self._process
        for iteration in range(self._point.iteration, settings.iterations):
            yield from self._iterate(iteration)
            process.emit({"event": "progress", "iteration": iteration + 1})
            yield from self._obey()
            kinds = {
                s.kind for s in self._clients[0].session.signals.all if s.clock == iteration + 1
            }
            stops = m.SignalKind.STOP in kinds
            if stops or kinds or (iteration + 1) % settings.snapshot == 0:
                yield from self._snapshot(iteration + 1)
            if stops:
                return
        if self._point.iteration == settings.iterations:
            process.emit({"event": "progress", "iteration": settings.iterations})
        yield from self._read()
        self._job.finals[self._rank] = b"".join(value.tobytes() for value in self._values)

    def _read(self) -> Waits:
        for client, value in zip(self._clients, self._values, strict=True):
            yield from client.read(0, value)

    def _iterate(self, iteration: int) -> Waits:
        yield from self._read()
        yield 0.2 + self._random.random()
        for client, value in zip(self._clients, self._values, strict=True):
            gradient = value * np.float32(0.5 + self._rank) + np.float32(iteration % 3 - 1)
            client.push(0, gradient, 0.1)
            client.tick()

    def _obey(self) -> Iterator[float]:
        commands = self._process.commands[self._obeyed :]
        self._obeyed += len(commands)
        for command in commands:
            if command["do"] in ("stop", "snapshot"):
                self._clients[0].signal(m.SignalKind[str(command["do"]).upper()])
        yield 0.0

    def _snapshot(self, iteration: int) -> Waits:
        yield from self._read()
        if self._rank:
            return
        parts = []
        for client, value in zip(self._clients, self._values, strict=True):
            asked, sent = client.session.ask_history(0)
            client.do(sent)
            history = yield from client.wait_for(lambda asked=asked: asked.arrays, "the history")
            parts += [value.copy(), *history]
        self._writing += 1
        self._process.task(self._write(iteration, b"".join(part.tobytes() for part in parts)))

    def _write(self, iteration: int, content: bytes) -> Waits:
        """Write a snapshot while training goes on: its content, then its checksum."""
        job, name = self._job, f"snapshot {iteration} of {self._process.name}"
        slow, full, damaged = (self._random.random() < 0.1 for _ in range(3))
        if full and job.world.deviates(f"{name}: the disk is full"):
            self._writing -= 1
            return
        job.disk[name] = Snapshot(content=content[: len(content) // 2], digest="")
        yield 5.0 if slow and job.world.deviates(f"{name}: the disk is slow") else 0.1
        digest = hashlib.sha256(content).hexdigest()
        if damaged and job.world.deviates(f"{name}: the disk damages it"):
            content = bytes(len(content))
        job.disk[name] = Snapshot(content=content, digest=digest)
        self._process.emit({"event": "snapshot", "state": name, "iteration": iteration})
        self._writing -= 1


def _plan_faults(job: Job) -> None:
    random, world = job.world.stream("plan"), job.world
    for number in range(random.choice((0, 1, 1, 2, 4))):
        kind, at_s, draw = random.choice(list(FAULTS)), random.random() * 25, random.random()
        for_s = draw_duration(random)
        if world.deviates(f"{kind} ({number}) at {at_s:.1f} s"):
            act = FAULTS[kind]
            world.after(at_s, lambda act=act, draw=draw, for_s=for_s: act(job, draw, for_s))


@cache
def undisturbed(number: int) -> bytes:
    """Return the final values of the undisturbed run."""
    job = Job(World(number, only=frozenset()), settings_of(number))
    assert not isinstance(ended := job.run(), JobError), ended
    return job.finals[0]


def simulate(world: World) -> None:
    """Run a seed."""
    number = world.seed % SETTINGS
    expected = undisturbed(number)
    job = Job(world, settings_of(number))
    job.primitives.limit_s = LIMIT_S
    _plan_faults(job)
    _judge(job, job.run(), expected)
    world.run(lambda: False, 60.0)
    left = [process.name for process in job.processes]
    if left:
        raise Violation(f"these outlive the job: {left}")


def _judge(job: Job, ended: RestartedJob | JobError, expected: bytes) -> None:
    if isinstance(ended, JobError):
        job.world.lossy = True
        if not (job.asked_to_stop or job.disturbed_early or job.gone):
            raise Violation(f"the job failed: {ended}")
        return
    job.world.lossy = ended.restarts > 0
    if ended.restarts and not job.disturbed:
        raise Violation("the job has started again, though nothing of it was disturbed")
    if ended.result.outcome is Outcome.STOPPED:
        if not job.asked_to_stop:
            raise Violation("the job stopped though nobody asked for it")
        return
    if ended.result.iteration != job.settings.iterations:
        raise Violation(f"the job ends at iteration {ended.result.iteration}")
    for rank in range(job.plan.worker_count):
        if job.finals.get(rank) != expected:
            raise Violation(f"worker {rank} ends with other bits after {ended.restarts} restarts")
