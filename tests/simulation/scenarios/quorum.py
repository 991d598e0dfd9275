"""Rounds that a quorum of the workers ends.

Checked: workers whose parts have counted in the same round have equal bits after it, of all tables
and shards; a round has a quorum, and all workers where one asks for all; the clock of a worker
grows; nobody waits for ever; at the end all have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np

from ps_server.protocol import messages as m
from ps_server.protocol.settings import Keeping, Rule, StoreSpec, TableSpec
from tests.simulation.client import SimulatedWorker, Waits, serve_shard
from tests.simulation.faults import judge, plan_faults
from tests.simulation.network import Fabric
from tests.simulation.processes import Process
from tests.simulation.world import Violation, World

RUN_S = 2000.0
TABLES = (
    TableSpec(name="w", size=12, rows=3, rule=Rule(momentum=0.5)),
    TableSpec(name="mean", size=2, keeping=Keeping.AVERAGE),
)


@dataclass(kw_only=True)
class Job:
    """One run: what its workers have in common, only for checks."""

    store: StoreSpec
    rounds: int
    ended: dict[int, m.Round] = field(default_factory=dict)
    """By clock."""
    values: dict[int, bytes] = field(default_factory=dict)
    """After the round of that clock."""


def simulate(world: World) -> None:
    """Run a seed."""
    random = world.stream("settings")
    workers = random.choice((2, 3, 4))
    store = StoreSpec(
        workers=workers,
        shards=random.choice((1, 2, 3)),
        tables=TABLES,
        quorum=random.randint(1, workers - 1),
        grace_s=random.choice((0.0, 0.01, 0.5)),
    )
    job = Job(store=store, rounds=random.choice((3, 8)))
    fabric = Fabric(world, bytes_s=random.choice((1e5, 1e7)))
    shards = [Process(world, f"shard {index}") for index in range(store.shards)]
    servers = [serve_shard(fabric, each, index, workers) for index, each in enumerate(shards)]
    processes = [Process(world, f"worker {rank}") for rank in range(workers)]
    names = [shard.name for shard in shards]
    tasks = [
        process.task(_work(job, fabric, process, rank, names, world.stream(f"work {rank}")))
        for rank, process in enumerate(processes)
    ]
    plan_faults(world, fabric, [*shards, *processes], longest_s=5.0)
    world.run(lambda: not world.open_tasks, RUN_S)
    judge(world, processes, tasks)
    if world.lossy:
        return
    if any(server.shard.counts.faults for server in servers):
        raise Violation("a shard refused a message of a worker that keeps to the protocol")
    last = job.ended[max(job.ended)]
    if len(last.workers) != workers:
        raise Violation(f"the run ends with a round of workers {last.workers}")


def _work(
    job: Job, fabric: Fabric, process: Process, rank: int, shards: list[str], random: Random
) -> Waits:
    """Make rounds until the workers together have made enough, and one in which all are."""
    worker = SimulatedWorker(fabric, process, rank, job.store, shards)
    yield from worker.start(lambda table: [np.zeros(TABLES[table].size, np.float32)])
    pace_s = random.choice((0.01, 0.05, 0.4))
    reached, complete = 0, False
    while reached < job.rounds or not complete:
        settles = reached >= job.rounds
        steps = 0 if settles else random.randint(1, 4)
        for _ in range(steps):
            yield random.random() * pace_s
            if worker.session.is_awaited:
                break
        ended = yield from _end_part(job, worker, reached + (not settles), whole=settles)
        reached = max(int(payload) for payload in ended.payloads)
        complete = len(ended.workers) == job.store.workers
    yield from worker.close()


def _end_part(job: Job, worker: SimulatedWorker, number: int, *, whole: bool) -> Waits:
    before = worker.session.clock
    for table, spec in enumerate(TABLES):
        part = np.full(spec.size, (worker.rank + 1) / (before + 2), np.float32)
        worker.push(table, part, 1.0)
    worker.session.describe_part(worker.rank + 1.0, b"%d" % number, whole=whole)
    worker.tick()
    ended = yield from worker.wait_for(worker.session.end_round, f"the round of clock {before}")
    values = b""
    for table, spec in enumerate(TABLES):
        out = np.full(spec.size, np.nan, np.float32)
        yield from worker.read(table, out)
        values += out.tobytes()
    clock = worker.session.clock
    if clock <= before or clock != ended.clock + 1 or worker.rank not in ended.workers:
        raise Violation(f"worker {worker.rank} at clock {before} continues from {ended}")
    if (
        job.ended.setdefault(clock, ended) != ended
        or job.values.setdefault(clock, values) != values
    ):
        raise Violation(
            f"worker {worker.rank} has other values, or another round, at clock {clock}"
        )
    if len(ended.workers) < (job.store.workers if whole else job.store.quorum):
        raise Violation(f"worker {worker.rank} was in {ended}, too few")
    return ended
