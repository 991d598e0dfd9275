"""Workers and shards of the parameter server: tables of all kinds under all consistency models.

Checked at each step: at staleness 0 every worker has the bits of the undisturbed run, wherever its
virtual workers are placed; at staleness s > 0 each value counts at least `clock - s` changes of
every worker of its plane, all of its own, and none that has not been made; no worker that waits for
those of rank 0 passes the iteration of a signal that it has not received; none receives one of an
earlier store; queues and held pushes stay short; collections have every contribution; a worker that
others wait for in vain is named to them; shards end with the last worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import numpy as np

from ps_server.codecs.blocks import Int8, Sign
from ps_server.codecs.registry import CodecPair
from ps_server.errors import PeerLeft
from ps_server.protocol import messages as m
from ps_server.protocol.row_settings import RowInit, RowTableSpec
from ps_server.protocol.settings import (
    CHUNKS_A_SHARD,
    Consistency,
    Keeping,
    Precision,
    Rule,
    RuleKind,
    StoreSpec,
    TableSpec,
)
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.simulation.client import SimulatedWorker, Waits, serve_shard
from tests.simulation.faults import judge, plan_faults
from tests.simulation.network import Fabric
from tests.simulation.processes import Process, Running
from tests.simulation.world import Violation, World

SETTINGS = 211
"""Numbers of settings, so that undisturbed runs are made once each."""
MOST_QUEUED = 200
RUN_S = 4000.0
RENEWED_CLOCK = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of, besides its deviations."""

    store: StoreSpec
    iterations: int
    staleness: int
    bandwidth_mbps: float | None
    row_table: RowTableSpec | None
    start: str
    """How the store begins: `plain`, `renewed` or after a `trial`."""
    signal_at: int | None
    gathers: bool
    virtual: int
    """Virtual workers of each worker, on average."""
    truant: bool
    """Whether the last worker leaves before the last iteration."""
    eager: bool
    """Whether workers of odd ranks leave as soon as they have pushed."""


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"settings {number}")
    workers, shards = random.choice((1, 2, 2, 2, 3, 4)), random.choice((1, 1, 2, 3))
    staleness = random.choice((0, 0, 0, 1, 2, 4))
    consistency = random.choice(list(Consistency))
    push = consistency is Consistency.SSP_PUSH
    codec = random.choice((Int8(), Sign()))
    tables = []
    only_rows = random.random() < 0.15
    for index in range(0 if only_rows else random.choice((1, 1, 2))):
        kind = random.choice((RuleKind.SGD, RuleKind.ADAM, RuleKind.MEAN))
        lossy = push and not staleness and random.random() < 0.2
        tables.append(
            TableSpec(
                name=f"t{index}",
                size=workers * random.choice((2, 5)),
                rows=random.choice((1, 2)),
                staleness=staleness,
                rule=Rule() if staleness else Rule(kind=kind, momentum=0.9),
                codec=CodecPair(codec, random.choice((codec, None))) if lossy else None,
            )
        )
    if push and not staleness and tables and random.random() < 0.3:
        tables.append(TableSpec(name="copy", size=4, keeping=Keeping.COPY))
    plain = not staleness and not any(t.codec for t in tables)
    clips = plain and random.random() < 0.3 and any(t.follows_gradients for t in tables)
    store = StoreSpec(
        workers=workers,
        shards=shards,
        tables=tuple(tables),
        consistency=consistency,
        clip=0.5 if clips else None,
        outside_norm=(0,) if clips and random.random() < 0.5 else (),
        precision=random.choice(list(Precision)) if plain and push else Precision.FLOAT32,
        chunks=Random(f"chunks {number}").choice((1, CHUNKS_A_SHARD)),
    )
    store = _on_hosts(store, Random(f"hosts {number}"))
    rows = RowTableSpec(
        name="rows",
        rows=7,
        dim=2,
        init=RowInit.UNIFORM,
        seed=3,
        staleness=random.choice((0, 2, 4)) if staleness or only_rows else 0,
    )
    return Settings(
        store=store,
        iterations=random.choice((2, 3, 5, 9)),
        staleness=staleness,
        bandwidth_mbps=random.choice((None, 0.0005, 0.01)),
        row_table=rows if only_rows or random.random() < 0.25 else None,
        start=random.choice(("plain", "plain", "renewed", "trial")),
        signal_at=random.choice((None, 0, 1, 2)),
        gathers=random.random() < 0.5,
        virtual=0 if staleness or only_rows else random.choice((0, 2, 3)),
        truant=workers > 1 and random.random() < 0.08 and not (store.hosts and clips),
        eager=random.random() < 0.3,
    )


def _on_hosts(store: StoreSpec, random: Random) -> StoreSpec:
    """Put several workers on some hosts, and deal the tables to planes; plane 0 has the first."""
    hosts = tuple(random.choice((1, 2, 2, 3)) for _ in range(store.workers))
    if random.random() < 0.5:
        return store
    planes = min(hosts)
    tables = [
        replace(spec, plane=random.randrange(planes) if index else 0)
        for index, spec in enumerate(store.tables)
    ]
    return replace(
        store,
        workers=sum(hosts),
        hosts=hosts,
        tables=tuple(tables),
        outside_norm=tuple(range(planes)) if store.outside_norm else (),
    )


@dataclass(kw_only=True)
class Job:
    """One run: what its workers have in common, only for checks."""

    world: World
    settings: Settings
    expected: tuple[tuple[bytes, ...], ...]
    """The values of each worker after each iteration of the undisturbed run; empty: not known."""
    made: list[int] = field(default_factory=list)
    """At staleness > 0: changes of each worker so far."""
    clocks: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Of the workers that wait for those of rank 0."""
    values: list[list[bytes]] = field(default_factory=list)
    """Of each worker, after each iteration."""
    signals: list[m.Signal] = field(default_factory=list)

    def place(self) -> StoreSpec:
        """Place the virtual workers of the run; return its store."""
        store, random = self.settings.store, self.world.stream("places")
        if not self.settings.virtual:
            return store
        hosts = store.seats.host_count
        count = self.settings.virtual * hosts - 1
        speeds = [random.random() + 0.1 for _ in range(hosts)]
        placed = VirtualWorkers.spread(count, speeds)
        if not self.world.deviates(f"places {placed.bounds}"):
            placed = VirtualWorkers.spread(count, [1.0] * hosts)
        return replace(store, virtual_workers=placed)


@cache
def undisturbed(number: int) -> tuple[tuple[bytes, ...], ...]:
    """Return the values of each worker after each iteration of the undisturbed run."""
    world = World(number, only=frozenset())
    return tuple(map(tuple, _run(world, settings_of(number), ()).values))


def simulate(world: World) -> None:
    """Run a seed."""
    number = world.seed % SETTINGS
    settings = settings_of(number)
    _run(world, settings, () if settings.staleness else undisturbed(number))


def _run(world: World, settings: Settings, expected: tuple[tuple[bytes, ...], ...]) -> Job:
    fabric = Fabric(world, bytes_s=world.stream("rate").choice((1e5, 1e7, 1e9)))
    store = settings.store
    job = Job(world=world, settings=settings, expected=expected)
    job.made, job.values = [0] * store.workers, [[] for _ in range(store.workers)]
    store = job.place()
    shards = [Process(world, f"shard {index}") for index in range(store.shards)]
    servers = [serve_shard(fabric, p, index, store.workers) for index, p in enumerate(shards)]
    workers = [Process(world, f"worker {rank}") for rank in range(store.workers)]
    tasks = []
    for rank, process in enumerate(workers):
        names = [shard.name for shard in shards]
        tasks.append(process.task(_work(job, store, fabric, process, rank, names)))
    plan_faults(world, fabric, [*shards, *workers], longest_s=5.0)
    world.run(lambda: not world.open_tasks, RUN_S)
    _judge(job, workers, tasks)
    if world.lossy or settings.truant:
        return job
    if any(server.shard.counts.faults for server in servers):
        raise Violation("a shard refused a message of a worker that keeps to the protocol")
    if not world.run(lambda: all(server.shard.members.finished for server in servers), 60.0):
        raise Violation("a shard does not end, though all workers have left")
    return job


def _judge(job: Job, workers: list[Process], tasks: list[Running]) -> None:
    """See `judge`. Where a worker leaves too early, the others must be notified."""
    if job.settings.truant and not job.world.lossy:
        for task in tasks:
            if isinstance(task.error, PeerLeft):
                task.error = None
    judge(job.world, workers, tasks)


def _work(
    job: Job, store: StoreSpec, fabric: Fabric, process: Process, rank: int, shards: list[str]
) -> Waits:
    settings, first = job.settings, store
    if settings.start == "trial":
        first = StoreSpec(
            workers=store.workers,
            hosts=store.hosts,
            shards=store.shards,
            tables=(TableSpec(name="trial", size=3, rows=3),),
            trial=True,
        )
    worker = SimulatedWorker(
        fabric,
        process,
        rank,
        first,
        shards,
        bandwidth_mbps=settings.bandwidth_mbps,
    )
    random = job.world.stream(f"work {rank}")
    if settings.start == "trial":
        yield from worker.start(lambda table: [np.zeros(3, np.float32)])
        out = np.zeros(3, np.float32)
        for table in worker.session.own_tables * 2:
            worker.push(table, np.ones(3, np.float32), 1.0)
            yield from worker.read(table, out)
        yield from worker.replace_trial(store)
    yield from worker.start(lambda table: _first(store, table))
    if settings.start == "renewed":
        early = rank == 0 and settings.signal_at is not None and random.random() < 0.5
        if early:
            worker.signal(m.SignalKind.SNAPSHOT)
        yield from worker.renew(RENEWED_CLOCK)
        yield from worker.start(lambda table: _first(store, table))
        if early:
            job.signals.extend(worker.session.signals.all)
    yield from _Training(job, worker, random).run()
    yield from worker.close()


def _first(store: StoreSpec, table: int) -> list[m.Array]:
    spec = store.tables[table]
    if spec.staleness:
        return [np.zeros(spec.size, np.float32)]
    return [np.linspace(-1, 1, spec.size, dtype=np.float32)]


class _Training:
    """The loop of one worker."""

    def __init__(self, job: Job, worker: SimulatedWorker, random: Random) -> None:
        self._job = job
        self._worker = worker
        self._random = random
        self._settings = job.settings
        self._store = job.settings.store
        self._begin = worker.session.clock
        self._rank = worker.rank
        self._seat = worker.session.seat
        self._follows_rank_0 = self._seat.local_rank == 0 or self._settings.row_table is not None
        self._outside = self._seat.local_rank in self._store.outside_norm
        self._tables = [t for t in worker.session.own_tables if not self._is_copy(t)]
        self._values = [np.zeros(spec.size, np.float32) for spec in self._store.tables]
        self._rows = np.zeros(0, np.float32)

    def _is_copy(self, table: int) -> bool:
        return self._store.tables[table].keeping is Keeping.COPY

    def run(self) -> Waits:
        """Train."""
        worker, settings = self._worker, self._settings
        if settings.row_table is not None:
            _, sent = worker.session.rows.create(settings.row_table)
            worker.do(sent)
        is_truant = settings.truant and self._rank == self._store.workers - 1
        for iteration in range(settings.iterations - is_truant):
            yield self._random.random() * 0.02
            yield from self._read_all(None)
            yield from self._iterate(iteration)
            self._check_signals()
            if settings.gathers and iteration % 2:
                yield from self._gather(iteration)
        if is_truant or (settings.eager and self._rank % 2):
            return
        yield from self._read_all(0)
        if not settings.eager:
            yield from worker.gather(b"")

    def _read_all(self, staleness: int | None) -> Waits:
        for table in self._tables:
            yield from self._worker.read(table, self._values[table], staleness)
        if self._settings.row_table is not None:
            rows = np.arange(self._settings.row_table.rows, dtype=np.uint32)
            self._rows = (yield from self._worker.rows(0, rows)).copy()
        clock = self._worker.session.clock - self._begin
        if self._settings.staleness:
            self._check_counts(clock, self._settings.staleness if staleness is None else staleness)
        else:
            self._check_bits(clock)

    def _check_bits(self, clock: int) -> None:
        found = b"".join(self._values[t].tobytes() for t in self._tables)
        if self._settings.row_table is not None and not self._settings.row_table.staleness:
            found += self._rows.tobytes()
        self._job.values[self._rank].append(found)
        expected = self._job.expected[self._rank] if self._job.expected else ()
        if clock < len(expected) and expected[clock] != found:
            raise Violation(f"worker {self._rank} has other bits in iteration {clock}")

    def _check_counts(self, clock: int, bound: int) -> None:
        others = self._store.seats.members(self._seat.local_rank)
        for table in self._tables:
            counts = self._values[table].reshape(-1, len(others))
            for host, other in enumerate(others):
                made = self._job.made[other]
                least = clock if other == self._rank else clock - bound
                found = counts[:, host]
                if found.min() < least or found.max() > made:
                    raise Violation(
                        f"worker {self._rank} at clock {clock} reads {found} changes of worker "
                        f"{other}, which has made {made}; expected at least {least}"
                    )

    def _iterate(self, iteration: int) -> Waits:
        worker = self._worker
        clock = worker.session.clock
        signals_at = self._random.randrange(len(self._tables) + 1)
        for place, table in enumerate(reversed(self._tables)):
            yield self._random.random() * 0.005
            self._signal_at(iteration, place == signals_at)
            if place == 0:
                self._job.made[self._rank] += 1
            self._push(table, iteration)
        yield self._random.random() * 0.05  # others may continue from what was pushed
        self._signal_at(iteration, signals_at == len(self._tables))
        if self._settings.row_table is not None:
            self._push_rows(iteration)
        if self._outside:  # such a gradient is a sum over the workers of the plane
            yield from worker.gather(b"", whole=False)
        if self._outside and self._seat.host == 0:
            worker.do(worker.session.norm.add_outside(clock, [0.25 * iteration]))
        worker.tick()
        if self._follows_rank_0:
            self._job.clocks[self._rank] = worker.session.clock
        if self._outside:
            total = lambda: worker.session.norm.total(clock)  # noqa: E731
            yield from worker.wait_for(total, f"the norm of iteration {clock}")
        self._check_memory()

    def _push_rows(self, iteration: int) -> None:
        rows = np.array([self._rank % 4, 4, 5 + iteration % 2], np.uint32)
        gradient = self._rows[rows] * np.float32(self._rank + 1) + np.float32(iteration)
        sent = self._worker.session.rows.push(0, rows, gradient, 0.1)
        self._worker.do(sent)

    def _check_memory(self) -> None:
        worker = self._worker
        if worker.queued > MOST_QUEUED:
            raise Violation(f"{worker.queued} messages of worker {self._rank} wait to be sent")
        nodes = max(1, 2 * self._settings.virtual * self._store.seats.host_count)
        held = [len(c.held) for row in worker.session.values.copies for c in row]
        if max(held, default=0) > (2 * self._settings.staleness + 2) * nodes:
            raise Violation(f"worker {self._rank} holds {max(held)} pushes of a chunk")

    def _push(self, table: int, iteration: int) -> None:
        size, hosts = self._store.tables[table].size, self._store.seats.host_count
        if self._settings.staleness:
            change = np.zeros((size // hosts, hosts), np.float32)
            change[:, self._seat.host] = 1
            self._values[table] += change.reshape(-1)
            self._worker.push(table, change.reshape(-1), 0.0)
            return
        self._worker.push_sums(table, lambda v: self._gradient(table, iteration, v), 0.1)

    def _gradient(self, table: int, iteration: int, virtual_worker: int) -> m.Array:
        phase = np.arange(len(self._values[table]), dtype=np.float32) * np.float32(0.1)
        sine = np.sin(phase + np.float32(iteration))
        return self._values[table] * np.float32(0.5 + virtual_worker) + sine

    def _signal_at(self, iteration: int, here: bool) -> None:
        if here and self._rank == 0 and iteration == self._settings.signal_at:
            signal = self._worker.signal(m.SignalKind.SNAPSHOT)
            self._job.signals.append(signal)
            if max(self._job.clocks.values()) >= signal.clock:
                raise Violation(f"{signal} is sent when workers are at {self._job.clocks}")

    def _check_signals(self) -> None:
        known = self._worker.session.signals.all
        if not set(known) <= set(self._job.signals):
            raise Violation(f"worker {self._rank} has signals of an earlier store: {known}")
        for signal in self._job.signals:
            passed = self._follows_rank_0 and signal.clock <= self._worker.session.clock
            if passed and signal not in known:
                raise Violation(
                    f"worker {self._rank} has passed iteration {signal.clock} without {signal}"
                )

    def _gather(self, iteration: int) -> Waits:
        members = self._store.seats.members(self._seat.local_rank)
        for whole, ranks in ((False, members), (True, range(self._store.workers))):
            own = b"%d of %d" % (iteration, self._rank)
            found = yield from self._worker.gather(own, whole=whole)
            expected = tuple(b"%d of %d" % (iteration, rank) for rank in ranks)
            if found != expected:
                raise Violation(f"worker {self._rank} gathered {found}; expected {expected}")
