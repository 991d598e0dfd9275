"""An elastic job: processes that go on after the loss of others, from snapshots in memory, and hosts
that come back, join and leave meanwhile.

The code of the workers is the real one (`elastic_worker.py`).

Checked: the job ends; with the iteration and the bits of the undisturbed run wherever it has
finished, and with its bits in every iteration and every memory snapshot before; with an error only
where the user has asked for its end, or it was disturbed before it had started. No start has a host
twice, or one on which the user has killed the job; no host is taken in more often than
`--elastic=max_rejoins` says; a request to regroup is followed within a few iterations. No start is from
disk while a process that nothing has happened to has a memory snapshot, unless too few workers are
left. No process outlives the job.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from poseidon.caffe.launch import training_job
from poseidon.caffe.launch.training_job import TrainingJob
from poseidon.caffe.proto.definition import SolverDefinition, parse_solver
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import Dialer, Needs
from poseidon.cluster.job_plan import Role
from poseidon.cluster.jobs.registry import JobRecord, RecordedProcess
from poseidon.cluster.jobs.requests import HostRequest
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.supervision.loop import JobListener
from poseidon.cluster.supervision.restarts import RestartedJob, Restarts, StartingPoint
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import JobResult, Outcome, SignalEffect, SignalReceived
from poseidon.engine.snapshot_files import SUFFIX
from poseidon.errors import JobError
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.launcher import host_changes, newcomers, processes, runner
from poseidon.launcher.balancing import Balancing
from poseidon.launcher.host_changes import HostChanges
from poseidon.launcher.listeners import Listeners
from poseidon.launcher.request import Balance, TrainRequest
from poseidon.launcher.site import Site
from poseidon.launcher.snapshots import SnapshotList
from tests.simulation.cluster import FAULTS, Cluster, ClusterDialer, Fault, draw_duration, hosts_of
from tests.simulation.elastic_worker import ElasticShard, ElasticWorker, installed
from tests.simulation.hosts import JobProcess, SimulatedHost
from tests.simulation.world import Violation, World

SETTINGS = 41
LIMIT_S = 6000.0
STALL_S = 14.0
HUNG_S = 1e5
ENDED_S = 90.0
"""When all processes have ended after the job: those whose agent was killed wait for a minute."""
MOST_UNTIL_REGROUPED = 7
"""Iterations that a job may make before it follows a request to regroup; with local steps, rounds."""
POLL_S = 1.0
"""How often the launcher looks for hosts that are missing: simulated with fewer events."""
SOLVER = """
net_param {{
  layer {{ name: "data" type: "DummyData" top: "x" top: "y" dummy_data_param {{
    shape {{ dim: 2 dim: 3 }} data_filler {{ type: "gaussian" std: 1 }}
    shape {{ dim: 2 dim: 2 }} data_filler {{ type: "gaussian" std: 1 }} }} }}
  layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "p"
    param {{ lr_mult: 1 }} param {{ lr_mult: 0 decay_mult: 1 }} inner_product_param {{
    num_output: 2 weight_filler {{ type: "xavier" }} bias_filler {{ type: "constant" value: 1 }} }} }}
  layer {{ name: "loss" type: "EuclideanLoss" bottom: "p" bottom: "y" top: "l" }}
}}
base_lr: 0.05 lr_policy: "fixed" max_iter: {iterations} snapshot: {snapshot} type: "{rule}"
weight_decay: 0.01 average_loss: 3 display: 4 random_seed: 5 solver_mode: CPU
"""
"""A net whose virtual workers draw random records. AdaGrad keeps a history of the blob that does not
learn."""
SLOW_P = 0.3
"""How many hosts are slow, where some are."""
DISK, DISK_WEIGHTS = ("sound", "slow", "full", "torn"), (9, 1, 1, 2)
FOLDER = Path(tempfile.gettempdir()) / f"poseidon-simulation-{os.getpid():08}"
"""Where the run's files are; of one run at a time."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the bits of a job follow from."""

    virtual: int
    iterations: int
    snapshot: int
    rule: str
    compress: str
    steps: int
    kind: ExchangeKind

    def options(self) -> ExchangeOptions:
        """Return the options of the exchange."""
        return ExchangeOptions(
            kind=self.kind, compress=self.compress, local_steps=self.steps, check_replicas=5
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a job is made of, besides its deviations."""

    weights: Weights
    hosts: int
    workers: int
    """Of each host, save for the first."""
    first: int
    """Workers of the first host."""
    replicas: int | None
    every: int | None
    min_workers: int
    max_rejoins: int
    slowest: float
    """How much slower some hosts are than others, where virtual workers are placed by speed; 0: they
    are not."""


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"elastic {number}")
    hosts, workers = random.choice((1, 2, 2, 3, 3, 4)), random.choice((1, 1, 1, 2))
    first = Random(f"first of elastic {number}").choice((workers, workers, 3 - workers))
    total = (hosts - 1) * workers + first
    steps = random.choice((0, 0, 2))
    compress = random.choice(("", "", "*=int8", "*=topk:0.4"))
    kinds = [ExchangeKind.SERVER]
    if not (steps or compress):
        kinds += [ExchangeKind.SERVER, ExchangeKind.FACTORS, ExchangeKind.ALLREDUCE]
    replicas = random.choice((0, None, None, 1, 2))
    if hosts == 1:
        replicas = None
    elif replicas is not None:
        replicas = min(replicas, hosts - 1)
    return Settings(
        weights=Weights(
            virtual=total + random.choice((0, 1, 2)) * workers,
            iterations=random.choice((6, 10, 16)),
            snapshot=random.choice((4, 6, 100) if steps else (4, 7, 100)),
            rule=random.choice(("SGD", "AdaGrad")),
            compress=compress,
            steps=steps,
            kind=random.choice(kinds),
        ),
        hosts=hosts,
        workers=workers,
        first=first,
        replicas=replicas,
        every=random.choice((None, 2, 3) if hosts > 1 else (2, 3)),
        min_workers=min(random.choice((1, 1, workers + 1)), total),
        max_rejoins=random.choice((0, 1, 3)),
        slowest=0 if replicas == 0 else random.choice((0, 0, 1, 3)),
    )


class Course(Cluster):
    """One run: its hosts, its disk, and what its processes have in common, only for checks."""

    def __init__(self, world: World, settings: Settings, expected: Sequence[bytes]) -> None:
        super().__init__(world, settings.hosts)
        self.settings = settings
        self.iterations = settings.weights.iterations
        self.expected = expected
        self.values: dict[int, bytes] = {}
        """By iteration, where no others are expected."""
        self.workers: dict[JobProcess, ElasticWorker] = {}
        self.hosts: dict[JobProcess, str] = {}
        """The address of the host of each worker."""
        self.finals: dict[int, tuple[int, bytes]] = {}
        self.holders: dict[JobProcess, int] = {}
        """The processes that hold a memory snapshot, and its iteration."""
        self.on_started: Callable[[], None] = lambda: None
        """Called when the job runs for the first time."""
        self.died: set[str] = set()
        """The hosts that a process has ended on since the last loss."""
        self.commands = _Commands()
        self.requests = _Requests(self)
        self.reached = 0
        """The most iterations that a worker has made."""
        self._disk = world.stream("disk")
        self._files = 0
        self.broken: Exception | None = None
        """What no worker may raise, and one has."""
        self.full = False
        """Whether the disk was."""
        spare = SimulatedHost(self.fabric, "spare host", self.spawn)
        self.machines[f"10.0.0.{settings.hosts + 1}"] = spare

    def spawn(self, process: JobProcess, spec: ProcessSpec) -> None:
        """See `Cluster`."""
        process.on_death.append(lambda silent: self.died.add(spec.name.host))
        if spec.name.role is Role.SHARD:
            ElasticShard(self, process, json.loads(spec.first_line))
        else:
            self.hosts[process] = spec.name.host
            ElasticWorker(self, process, spec.first_line)

    def ask_to_stop(self, within_s: float | None) -> None:
        """See `Cluster`."""
        self.requests._received.append(SignalReceived(effect=SignalEffect.STOP, within_s=within_s))

    def read_solver(self, path: object) -> SolverDefinition:
        """See `elastic_worker.Course`."""
        return _solver_of(self.settings.weights)

    def pid(self, process: JobProcess) -> int:
        """See `elastic_worker.Course`."""
        return list(self.workers).index(process)

    def iteration_s(self, process: JobProcess, draw: float) -> float:
        """See `elastic_worker.Course`."""
        if process.hangs:
            return HUNG_S
        settings, slow = self.settings, self.world.stream(f"speed {self.hosts[process]}").random()
        workers = (settings.hosts - 1) * settings.workers + settings.first
        usual = settings.weights.virtual / workers
        return (0.6 + 0.6 * draw) / usual * (1 + settings.slowest * (slow < SLOW_P))

    def check(self, name: str, iteration: int, values: bytes) -> None:
        """See `elastic_worker.Course`."""
        self.reached = max(self.reached, iteration)
        if iteration % max(1, self.settings.weights.steps):
            return  # each virtual worker has values of its own
        expected = self.expected[iteration] if self.expected else values
        if self.values.setdefault(iteration, expected) != values:
            self.broken = Violation(f"{name} has other bits after iteration {iteration}")
            raise self.broken

    def holds(self, process: JobProcess, iteration: int) -> None:
        """See `elastic_worker.Course`."""
        self.holders[process] = iteration

    def ended(self, rank: int, iteration: int, values: bytes) -> None:
        """See `elastic_worker.Course`."""
        if iteration == self.iterations and values:
            self.check(f"worker {rank}", iteration, values)
        self.finals[rank] = iteration, values

    def write(self, process: JobProcess, path: Path) -> None:
        """See `elastic_worker.Course`."""
        random, number = self._disk, self._files
        self._files += 1
        kind, draw = random.choices(DISK, DISK_WEIGHTS)[0], random.random()
        slow = kind == "slow" and self.world.deviates(f"file {number} slow")
        if slow:  # it may not pause in time
            self.touched.add(process)
        self.primitives.time.sleep(30 * draw if slow else 0.03)
        if kind == "full" and self.world.deviates(f"file {number} on a full disk"):
            self.full = True
            raise OSError(errno.ENOSPC, "No space left on device")
        if kind == "torn" and path.suffix == SUFFIX and self.world.deviates(f"file {number} torn"):
            state = path.with_suffix("")
            state.write_bytes(state.read_bytes()[: int(draw * state.stat().st_size)])


class _Requests(SignalRequests):
    """The requests; from which iteration on one to regroup waits."""

    def __init__(self, course: Course) -> None:
        super().__init__(TrainRequest().supervision_settings())
        self._course = course
        self.waits_since = math.inf

    def regroup(self) -> None:
        """See `SignalRequests`."""
        self.waits_since = self._course.reached
        super().regroup()

    def forget_regroup(self) -> None:
        """See `SignalRequests`."""
        self.waits_since = math.inf
        super().forget_regroup()


class _Commands:
    """See `RequestFiles`."""

    def __init__(self) -> None:
        self.open: deque[HostRequest] = deque()

    def take(self) -> HostRequest | None:
        """See `RequestFiles`."""
        return self.open.popleft() if self.open else None

    def answer(self, text: str, *, done: bool) -> None:
        """See `RequestFiles`."""

    def close(self) -> None:
        """See `RequestFiles`."""


class _Site(Site):
    """The hosts; no file of theirs is checked."""

    def __init__(self, hosts: Sequence[Host], dialer: Dialer) -> None:
        super().__init__(hosts, dialer)
        self._job = "job"

    def _checked(
        self, hosts_: Sequence[Host], needs: Needs, *alike: RemoteAgent
    ) -> tuple[Host, ...]:
        return tuple(replace(host, peer_address=host.address) for host in hosts_)

    def has_processes(self, host: Host) -> bool:
        """See `Site`."""
        return host.address in [each.address for each in self.hosts]


class _Job(TrainingJob):
    """The job."""

    def __init__(self, settings: Settings, site: Site) -> None:
        weights = settings.weights
        request = TrainRequest(
            solver=FOLDER / "solver.prototxt",
            job="job",
            output=FOLDER / "job",
            threads=1,
            workers=settings.workers,
            virtual_workers=weights.virtual,
            elastic=settings.replicas,
            memory_snapshot_every=settings.every,
            min_workers=settings.min_workers,
            max_rejoins=settings.max_rejoins,
            max_restarts=50,
            stall_timeout=STALL_S,
            exchange=weights.options(),
            balance=Balance(measured=settings.slowest > 0),
        )
        super().__init__(request, site)

    def import_ahead(self) -> tuple[()]:
        """Nothing: simulated processes import nothing."""
        return ()


class _Driver(runner._JobRun):
    """The driver of the job's starts; the parts of the real one that serve users are left out."""

    def __init__(self, course: Course) -> None:
        settings = self._settings = course.settings
        self.course = course
        first, *others = hosts_of(settings.hosts)
        hosts = [replace(first, workers=settings.first), *others]
        self._job = _Job(settings, _Site(hosts, ClusterDialer(course)))
        self._registration: Any = _Registration()
        self._requests = course.requests
        self._terminal: Any = SimpleNamespace(print=self._print)
        self._snapshots = SnapshotList(self._job.origin, self._print)
        self._plan_file: Any = SimpleNamespace(plan="")
        self._changes = HostChanges(self._job, self._registration, self._requests, self._print)
        self._balancing = Balancing(self._job, self._requests, self._print, now=course.world.clock)
        self._listeners = Listeners(
            self._changes, self._balancing, self._snapshots, _Started(course)
        )
        self._rejoined: Counter[int] = Counter()
        self._known = {host.id for host in self._job.site.hosts}
        self._in_vain = 0
        self.lines: list[str] = []

    def run_job(self) -> RestartedJob | JobError:
        """Run the job to its end."""
        job = self._job
        try:
            self._changes.start()
            return Restarts(self, job.max_restarts, job.request.return_timeout).run()
        except JobError as error:
            return error
        finally:
            self._listeners.close()
            job.site.close()

    def start(self, attempt: int, point: StartingPoint) -> JobResult:
        """See `RestartDriver`."""
        course, hosts = self.course, self._job.plan.hosts
        course.finals.clear()
        if len({host.id for host in hosts}) < len(hosts):
            raise Violation(f"a start has a host twice: {hosts}")
        if point.memory:
            self._check_killed()
        return super().start(attempt, point)

    def _make_ready(self, point: StartingPoint) -> None:
        super()._make_ready(point)
        self._check_killed()

    def _check_killed(self) -> None:
        course = self.course
        killed = {agent.label for agent in course.killed if agent.killed_by_user}
        if killed & {course.machines[host.address].name for host in self._job.plan.hosts}:
            raise Violation("the job starts again where the user has killed it")

    def memory_point(self) -> tuple[StartingPoint, str] | None:
        """See `RestartDriver`."""
        before = {host.id for host in self._job.site.hosts}
        found = super().memory_point()
        if found is None:
            self._check_nothing_is_left()
        self.course.died.clear()
        if found is None:
            return None
        new = {host.id for host in self._job.site.hosts} - before
        for number in new & self._known:
            self._rejoined[number] += 1
            if self._rejoined[number] > self._settings.max_rejoins:
                raise Violation(f"client {number} is taken in again {self._rejoined[number]} times")
        self._known |= new
        return found

    def _check_nothing_is_left(self) -> None:
        """Check that no start from memory was possible."""
        course, plan = self.course, self._job.plan
        if course.asked_to_stop:
            return
        sound = [
            host
            for host in plan.hosts
            if host.address not in course.died
            and any(agent.process.alive for agent in course.machines[host.address].agents)
            and not course.touched & set(course.machines[host.address].everything)
        ]
        holders = [
            process.name
            for host in sound
            for process in course.machines[host.address].processes
            if process in course.holders
        ]
        if holders and sum(map(plan.workers_on, sound)) >= self._settings.min_workers:
            raise Violation(f"a start from disk, though {holders} hold a memory snapshot")

    def _print(self, text: str) -> None:
        self.lines.append(f"{self.course.world.now:.2f} {text}")
        if text.startswith("warning: hosts can no longer join"):
            self.course.world.after(0.0, _violate, text)


def _violate(text: str) -> None:
    raise Violation(text)


class _Registration:
    """See `Registration`."""

    record = JobRecord(
        job="job",
        launcher=RecordedProcess(name="launcher", host="127.0.0.1", pid=1, created="0.0"),
        hostfile=None,
        hosts=(),
        output="/out",
        started_s=0.0,
    )

    def add(self, *_: object) -> None:
        """See `Registration`."""

    def keep(self, _: object) -> None:
        """See `Registration`."""

    def clear(self) -> None:
        """See `Registration`."""

    def joins(self, _: Host) -> None:
        """See `Registration`."""

    def left(self, _: int) -> None:
        """See `Registration`."""


class _Started(JobListener):
    """Notes that the job runs."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def on_started(self) -> None:
        """See `JobListener`."""
        if not self._course.started:
            self._course.started = True
            self._course.on_started()


@contextlib.contextmanager
def _installed(course: Course) -> Iterator[None]:
    """Let the code of the launcher and of the workers' memory live in the run's world."""
    primitives = course.primitives
    places: Sequence[tuple[Any, str, object]] = (
        (host_changes, "queue", primitives.queue),
        (newcomers, "queue", primitives.queue),
        (newcomers, "time", primitives.time),
        (newcomers, "_POLL_S", POLL_S),
        (host_changes, "threading", primitives.threading),
        (host_changes, "time", primitives.time),
        (host_changes, "_POLL_S", POLL_S),
        (host_changes, "RequestFiles", lambda folder, job: course.commands),
        (host_changes, "Registry", lambda folder: SimpleNamespace(folder=folder)),
        (runner, "time", primitives.time),
        (training_job, "read_solver", course.read_solver),
        (training_job, "pack_solver", lambda path, settings: "the definition"),
        (processes, "is_encrypted", lambda encrypt, hosts: False),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(primitives.installed())
        stack.enter_context(installed(course))
        for module, name, stands_in in places:
            stack.enter_context(patch.object(module, name, stands_in))
        yield


def _join(cluster: Cluster, draw: float, for_s: float) -> None:
    """Let a host take part (`poseidon join`)."""
    assert isinstance(cluster, Course)
    address = list(cluster.machines)[-1 if draw < 0.8 else 0]
    cluster.commands.open.append(HostRequest(do="join", host=address))


def _leave(cluster: Cluster, draw: float, for_s: float) -> None:
    """Let a host go (`poseidon leave`)."""
    assert isinstance(cluster, Course)
    address = list(cluster.machines)[int(draw * len(cluster.machines))]
    cluster.commands.open.append(HostRequest(do="leave", host=address))


def _hang(cluster: Cluster, draw: float, for_s: float) -> None:
    """Let a worker do nothing any more, as one whose file system hangs; its threads live."""
    assert isinstance(cluster, Course)
    process = cluster.some_process(draw)
    if process in cluster.workers:
        cluster.note(process)
        process.hangs = True


def _ask_for_snapshot(cluster: Cluster, draw: float, for_s: float) -> None:
    """Ask for a snapshot on disk (SIGHUP)."""
    assert isinstance(cluster, Course)
    cluster.requests._received.append(SignalReceived(effect=SignalEffect.SNAPSHOT))


def _kill_holder(cluster: Cluster, draw: float, for_s: float) -> None:
    """Kill a process that holds a memory snapshot, or crash its host."""
    assert isinstance(cluster, Course)
    holders = [process for process in cluster.holders if process.alive]
    if holders:
        cluster.note()
        holders[int(draw * len(holders))].exit(-9)


ELASTIC_FAULTS: Mapping[str, Fault] = {
    **FAULTS,
    "holder": _kill_holder,
    "join": _join,
    "leave": _leave,
    "hang": _hang,
    "snapshot": _ask_for_snapshot,
}
WEIGHTS = {"kill": 4, "crash": 4, "holder": 2, "join": 2, "leave": 2, "agent term": 2}
"""How often a fault happens, beside the others."""
EARLY_P = 0.1
NEAR_P, NEAR_S = 0.4, 3.0
"""How often a fault comes soon after the one before, and within how many seconds."""


def _plan_faults(course: Course) -> None:
    """Plan faults from the moment when the job runs; sometimes from its beginning."""
    random = course.world.stream("plan")
    early = random.random() < EARLY_P
    if early:
        _plan(course, random)
    else:
        course.on_started = lambda: _plan(course, random)


def _plan(course: Course, random: Random) -> None:
    world, at_s = course.world, 0.0
    kinds, lasts_s = list(ELASTIC_FAULTS), 0.9 * course.iterations
    weights = [WEIGHTS.get(kind, 1) for kind in kinds]
    for number in range(random.choice((1, 1, 2, 3, 5))):
        near = number and random.random() < NEAR_P
        at_s = at_s + random.random() * NEAR_S if near else random.random() * lasts_s
        kind, draw = random.choices(kinds, weights)[0], random.random()
        for_s = draw_duration(random)
        if world.deviates(f"{kind} ({number}) {at_s:.1f} s later"):
            world.after(at_s, ELASTIC_FAULTS[kind], course, draw, for_s)


@cache
def _solver_of(weights: Weights) -> SolverDefinition:
    fields = {name: getattr(weights, name) for name in ("iterations", "snapshot", "rule")}
    content = SOLVER.format(**fields).encode()
    return parse_solver(content, source="solver.prototxt", folder=FOLDER)


@cache
def undisturbed(weights: Weights) -> tuple[bytes, ...]:
    """Return the values after each iteration of an undisturbed run on one host."""
    alone = {"hosts": 1, "workers": 1, "first": 1, "min_workers": 1}
    settings = replace(settings_of(0), weights=weights, replicas=0, slowest=0, **alone)
    course = Course(World(0, only=frozenset()), settings, ())
    ended = _run(course)
    assert isinstance(ended, RestartedJob), ended
    assert not (ended.restarts or ended.memory_starts), ended
    return tuple(course.values.get(iteration, b"") for iteration in range(course.iterations + 1))


def _run(course: Course) -> RestartedJob | JobError:
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "job").mkdir(parents=True)
    for host in course.machines.values():
        host.scratch = str(FOLDER / host.name)
        Path(host.scratch).mkdir()
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        # gradients of workers are changed in place, which tensors of `inference_mode` refuse
        with torch.inference_mode(mode=False), torch.no_grad(), _installed(course):
            ended = _Driver(course).run_job()
            course.world.run(lambda: False, ENDED_S)
            return ended
    finally:
        logging.disable(disabled)
        shutil.rmtree(FOLDER, ignore_errors=True)


def simulate(world: World) -> None:
    """Run a seed."""
    settings = settings_of(world.seed % SETTINGS)
    course = Course(world, settings, undisturbed(settings.weights))
    course.primitives.limit_s = LIMIT_S
    _plan_faults(course)
    _judge(course, _run(course))
    left = [process.name for process in course.processes]
    if left:
        raise Violation(f"these outlive the job: {left}")


def _judge(course: Course, ended: RestartedJob | JobError) -> None:
    if course.broken is not None:
        raise course.broken
    for thread in course.world.threads:
        if thread.error is not None:
            raise thread.error
    if isinstance(ended, JobError):
        course.world.lossy = True
        if not (course.asked_to_stop or course.disturbed_early or course.full or course.gone):
            raise Violation(f"the job failed: {ended}")
        return
    course.world.lossy = ended.restarts > 0 or ended.memory_starts > 0
    if course.world.lossy and not course.disturbed:
        raise Violation("the job has started again, though nothing of it was disturbed")
    if ended.result.outcome is Outcome.STOPPED:
        if not course.asked_to_stop:
            raise Violation("the job stopped though nobody asked for it")
        return
    if not course.finals:
        raise Violation("no worker has come to the end")
    most = MOST_UNTIL_REGROUPED * max(1, course.settings.weights.steps)
    if course.iterations - course.requests.waits_since > most:
        raise Violation("the job has not regrouped, though it was asked to")
    for rank, (iteration, _) in course.finals.items():
        if iteration != course.iterations:
            raise Violation(f"worker {rank} ends after iteration {iteration}")
