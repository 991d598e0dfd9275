"""Workers that send each other factors: the carrier, its rounds and its connections.

Checked at each step: at staleness 0 every worker has the bits of the undisturbed run; at staleness
s > 0 each weight counts at least `clock - s` rounds of every worker, all pairs of its own, and none
that was not sent; queues stay short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, cast
from unittest.mock import patch

import torch

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.factors import rebuilding
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import Rule
from ps_server.errors import StalenessTimeout, as_server_error
from ps_server.network import Network
from tests.simulation.client import TIMEOUT_S, Waits
from tests.simulation.faults import judge, plan_faults
from tests.simulation.network import Fabric, SimulatedWire
from tests.simulation.processes import Process, Question
from tests.simulation.scenarios.sums import Work
from tests.simulation.world import Violation, World

SETTINGS = 53
RUN_S = 4000.0
INPUTS = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of, besides its deviations."""

    workers: int
    tables: int
    staleness: int
    iterations: int
    start_clock: int


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"factors {number}")
    return Settings(
        workers=random.choice((2, 2, 3, 4)),
        tables=random.choice((1, 2)),
        staleness=random.choice((0, 0, 1, 2)),
        iterations=random.choice((2, 4, 7)),
        start_clock=random.choice((0, 3)),
    )


class Job:
    """One run: what its workers have in common, only for checks."""

    def __init__(self, settings: Settings, expected: tuple[bytes, ...] | None) -> None:
        self.settings = settings
        self.expected = expected
        self.sent = [0] * settings.workers
        self.addresses: dict[int, str] = {}
        self.processes: list[Process] = []
        self.connected_s = math.inf
        """When all workers were connected."""
        self.connected = 0
        self.values: list[list[bytes]] = [[] for _ in range(settings.workers)]


@cache
def undisturbed(number: int) -> tuple[bytes, ...]:
    """Return the weights after each iteration of the undisturbed run."""
    return tuple(_run(World(number, only=frozenset()), settings_of(number), None).values[0])


def simulate(world: World) -> None:
    """Run a seed."""
    number = world.seed % SETTINGS
    settings = settings_of(number)
    _run(world, settings, None if settings.staleness else undisturbed(number))


def _run(world: World, settings: Settings, expected: tuple[bytes, ...] | None) -> Job:
    fabric = Fabric(world, bytes_s=world.stream("rate").choice((1e5, 1e7, 1e9)))
    job = Job(settings, expected)
    workers = [Process(world, f"worker {rank}") for rank in range(settings.workers)]
    job.processes = workers
    tasks = [
        process.task(_Worker(job, fabric, process, rank).run())
        for rank, process in enumerate(workers)
    ]
    plan_faults(world, fabric, workers, longest_s=5.0)
    world.run(lambda: not world.open_tasks, RUN_S)
    judge(world, workers, tasks)
    timeouts = [task.error for task in tasks if isinstance(task.error, StalenessTimeout)]
    if timeouts and world.lost_s > job.connected_s:  # before, a connection has not stood
        raise Violation("a worker waits in vain for another one whose connection was lost")
    return job


class _Worker:
    """One worker."""

    def __init__(self, job: Job, fabric: Fabric, process: Process, rank: int) -> None:
        self._job = job
        self._process = process
        self._rank = rank
        self._random = fabric.world.stream(f"work {rank}")
        settings = job.settings
        self._weights = [torch.zeros(settings.workers, INPUTS) for _ in range(settings.tables)]
        rule = Rule() if settings.staleness else Rule(momentum=0.9)
        wire = SimulatedWire(fabric, process)
        self._wire = wire
        network = Network(rank=rank, size=settings.workers, token=b"secret", wire=wire)
        with patch.object(rebuilding, "SerialExecutor", Work):
            self._carrier = FactorCarrier(
                {
                    t: Trained(name=f"w{t}", tensor=w, rule=rule)
                    for t, w in enumerate(self._weights)
                },
                # At staleness > 0 a row of a weight counts the pairs of one worker.
                ExchangeSettings(gradient_scale=settings.workers, start_clock=settings.start_clock),
                member=Membership(
                    network=network, options=ExchangeOptions(staleness=settings.staleness)
                ),
                control=cast(Any, None),
                norms=cast(Any, None),
            )
        self._work = cast(Work, self._carrier._rebuilding._calls).calls
        self._left = False

    def run(self) -> Waits:
        """Train."""
        job, carrier, settings = self._job, self._carrier, self._job.settings
        links = carrier.peers.links
        job.addresses[self._rank] = links.address
        known = lambda: True if len(job.addresses) == settings.workers else None  # noqa: E731
        for process in job.processes:
            self._process.world.after(0.001, process.ask_all)
        yield from self._wait_for(known, "the addresses")
        for weight in carrier._weights.values():
            weight.open()
        links.begin([job.addresses[rank] for rank in range(settings.workers)])
        self._wire.serve(links.steps(), self._failed, self._ended)
        self._process.task(self._rebuild())
        job.connected += 1
        if job.connected == settings.workers:
            job.connected_s = self._process.world.now
        for iteration in range(settings.start_clock, settings.start_clock + settings.iterations):
            yield self._random.random() * 0.02
            yield from self._iterate(iteration)
        yield from self._settle(settings.start_clock + settings.iterations, staleness=0)
        links.leave()
        yield Question(lambda: True if self._left else None, "its last messages", TIMEOUT_S)

    def _rebuild(self) -> Waits:
        """What the thread that rebuilds does."""

        def found() -> object:
            if self._work:
                return self._work.popleft()
            return True if self._carrier.peers.monitor.closed else None

        while (work := (yield from self._wait_for(found, "a round", RUN_S))) is not True:
            yield self._random.random() * 0.003
            work()
            self._process.ask_all()

    def _failed(self, error: Exception) -> None:
        self._carrier.peers.links.fail(as_server_error(error, "the connections failed"))
        self._ended()

    def _ended(self) -> None:
        self._left = True
        self._carrier.peers.links.release()

    def _wait_for(self, question: Any, text: str, timeout_s: float = TIMEOUT_S) -> Waits:
        def ask() -> object:
            answer = question()
            if answer is None:
                self._carrier.peers.monitor.check()
            return answer

        return (yield Question(ask, f"worker {self._rank}: {text}", timeout_s))

    def _iterate(self, iteration: int) -> Waits:
        settings, carrier = self._job.settings, self._carrier
        yield from self._settle(iteration, staleness=settings.staleness)
        carrier.start(Step(iteration, (1.0,)))
        self._job.sent[self._rank] += 1
        for table in reversed(range(settings.tables)):
            yield self._random.random() * 0.005
            carrier.begin_factors(table, *self._factors(table, iteration))
            yield self._random.random() * 0.002
            carrier.release(table)
        queued = max(map(len, carrier.peers.links._out.boxes.values()))
        if queued > settings.tables * (2 * settings.staleness + 3):
            raise Violation(f"{queued} messages of worker {self._rank} wait to be sent")

    def _factors(self, table: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        workers = self._job.settings.workers
        if self._job.settings.staleness:
            u = torch.zeros(1, workers)
            u[0, self._rank] = 1
            return u, torch.ones(1, INPUTS)
        u = torch.linspace(-1, 1, 2 * workers).reshape(2, workers) * (self._rank + 1) / 8
        return u, self._weights[table][:2] * 0.5 + iteration % 5

    def _settle(self, clock: int, *, staleness: int) -> Waits:
        """Wait for the weights, and check them."""
        carrier, start = self._carrier, self._job.settings.start_clock
        for table, weight in carrier._weights.items():
            applied = lambda w=weight: (  # noqa: E731
                True if w.progress.applied >= max(clock - staleness, start) else None
            )
            yield from self._wait_for(applied, f"table {table} for iteration {clock}")
            carrier._wait(table, clock - staleness)
        if self._job.settings.staleness:
            self._check_counts(clock - start, staleness)
        else:
            self._check_bits(clock - start)

    def _check_bits(self, clock: int) -> None:
        found = b"".join(weight.numpy().tobytes() for weight in self._weights)
        self._job.values[self._rank].append(found)
        expected = self._job.expected
        if expected is not None and expected[clock] != found:
            raise Violation(f"worker {self._rank} has other bits in iteration {clock}")

    def _check_counts(self, clock: int, bound: int) -> None:
        for weight in self._weights:
            counts = (-weight[:, 0]).tolist()
            for other, sent in enumerate(self._job.sent):
                least = clock if other == self._rank else clock - bound
                if not least <= counts[other] <= sent:
                    raise Violation(
                        f"worker {self._rank} at clock {clock} has {counts[other]} rounds of "
                        f"worker {other}, which has sent {sent}; expected at least {least}"
                    )
