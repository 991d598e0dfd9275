"""Workers that add their gradients by all-reduce: sums, rounds, buckets and connections.

Checked at each step: every worker has the bits that one process computes, wherever the virtual
workers are placed and in whichever order messages come; queues stay short; a lost connection is
noticed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from poseidon.exchange.allreduce import sums as sums_module
from poseidon.exchange.allreduce.sums import Sums
from poseidon.exchange.device import HOST
from poseidon.exchange.peers import Peers
from poseidon.exchange.worker_links import LAST
from ps_server.errors import StalenessTimeout, as_server_error
from ps_server.network import Network
from ps_server.protocol.virtual_workers import Node, TreeSum, VirtualWorkers
from tests.simulation.client import TIMEOUT_S, Waits
from tests.simulation.faults import judge, plan_faults
from tests.simulation.network import Fabric, SimulatedWire
from tests.simulation.processes import Process, Question
from tests.simulation.world import Violation, World

SETTINGS = 61
RUN_S = 4000.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of, besides its deviations."""

    workers: VirtualWorkers
    processes: int
    sizes: tuple[int, ...]
    bucket_bytes: int
    iterations: int
    values: bool
    """Whether it begins with the values of rank 0."""


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"sums {number}")
    processes = random.choice((1, 2, 2, 3, 4))
    count = random.choice((processes, processes + 1, 2 * processes + 1))
    speeds = [random.random() + 0.1 for _ in range(processes)]
    return Settings(
        workers=VirtualWorkers.spread(count, speeds),
        processes=processes,
        sizes=tuple(random.choice((1, 3, 7)) for _ in range(random.choice((1, 2, 3)))),
        bucket_bytes=random.choice((4, 16, 1000)),
        iterations=random.choice((2, 3, 5)),
        values=random.random() < 0.5,
    )


def gradient(weight: Tensor, iteration: int, virtual_worker: int) -> Tensor:
    """Return the gradient of a virtual worker."""
    return weight * (0.3 + virtual_worker / 7) + (iteration % 3 - 0.9)


def first(size: int) -> Tensor:
    """Return the values of a tensor at the beginning."""
    return torch.linspace(-1, 1, size)


@cache
def reference(number: int) -> tuple[bytes, ...]:
    """Return the weights after each iteration, as one process computes them."""
    settings = settings_of(number)
    count = settings.workers.count
    weights = [first(size) for size in settings.sizes]
    found = [b"".join(weight.numpy().tobytes() for weight in weights)]
    for iteration in range(settings.iterations):
        for weight in weights:
            total = _sum_of(Node(0, count), count, weight, iteration)
            weight -= 0.1 * (total / count)
        found.append(b"".join(weight.numpy().tobytes() for weight in weights))
    return tuple(found)


def _sum_of(node: Node, count: int, weight: Tensor, iteration: int) -> Tensor:
    tree = TreeSum[Tensor](count)
    for v in range(*node):
        tree.put(Node(v, v + 1), gradient(weight, iteration, v))
    return tree.parts[node]


class Job:
    """One run: what its workers have in common, only for checks."""

    def __init__(self, number: int) -> None:
        self.settings = settings_of(number)
        self.expected = reference(number)
        self.addresses: dict[int, str] = {}
        self.expecting = 0
        """Workers that expect the values of rank 0."""
        self.processes: list[Process] = []
        self.connected = 0
        self.connected_s = math.inf
        """When all workers were connected."""


def simulate(world: World) -> None:
    """Run a seed."""
    fabric = Fabric(world, bytes_s=world.stream("rate").choice((1e4, 1e6, 1e9)))
    job = Job(world.seed % SETTINGS)
    job.processes = [Process(world, f"worker {rank}") for rank in range(job.settings.processes)]
    workers = [Worker(job, fabric, process, rank) for rank, process in enumerate(job.processes)]
    tasks = [worker.process.task(worker.run()) for worker in workers]
    plan_faults(world, fabric, job.processes, longest_s=5.0)
    world.run(lambda: not world.open_tasks, RUN_S)
    judge(world, job.processes, tasks)
    timeouts = [task.error for task in tasks if isinstance(task.error, StalenessTimeout)]
    if timeouts and world.lost_s > job.connected_s:  # before, a connection has not stood
        raise Violation("a worker waits in vain for another one whose connection was lost")


class Work:
    """Stands for an executor: a task makes the calls of its thread."""

    def __init__(self, *_: object, threaded: bool, **__: object) -> None:
        self._threaded = threaded
        self.calls: deque[Callable[[], None]] = deque()

    def call(self, function: Callable[[], None]) -> None:
        if self._threaded:
            self.calls.append(function)
        else:
            function()

    def drain(self) -> None:
        assert not self._threaded


class Worker:
    """One worker."""

    def __init__(self, job: Job, fabric: Fabric, process: Process, rank: int) -> None:
        self.process = process
        self._job = job
        self._rank = rank
        self._random = fabric.world.stream(f"work {rank}")
        settings = job.settings
        start = first if rank == 0 or not settings.values else torch.zeros
        self._weights = [start(size) for size in settings.sizes]
        self._wire = SimulatedWire(fabric, process)
        network = Network(rank=rank, size=settings.processes, token=b"secret", wire=self._wire)
        self._peers = Peers(network)
        with patch.object(sums_module, "SerialExecutor", Work):
            self._sums = Sums(
                dict(reversed(list(enumerate(settings.sizes)))),
                self._peers,
                settings.workers,
                HOST,
                bucket_bytes=settings.bucket_bytes,
            )
        self._work = cast(Work, self._sums._adding).calls
        self._closing = self._left = False

    def run(self) -> Waits:
        """Train."""
        yield from self._connect()
        if self._job.settings.values:
            yield from self._values()
        for iteration in range(self._job.settings.iterations):
            self._check_bits(iteration)
            yield self._random.random() * 0.02
            yield from self._iterate(iteration)
        self._check_bits(self._job.settings.iterations)
        yield from self._leave()

    def _connect(self) -> Waits:
        job, links = self._job, self._peers.links
        job.addresses[self._rank] = links.address
        self._tell_all()
        known = lambda: True if len(job.addresses) == job.settings.processes else None  # noqa: E731
        yield from self._wait_for(known, "the addresses")
        links.begin([job.addresses[rank] for rank in range(job.settings.processes)])
        self._wire.serve(links.steps(), self._failed, self._ended)
        self.process.task(self._add())
        job.connected += 1
        if job.connected == job.settings.processes:
            job.connected_s = self.process.world.now

    def _tell_all(self) -> None:
        for process in self._job.processes:
            self.process.world.after(0.001, process.ask_all)

    def _values(self) -> Waits:
        job = self._job
        self._sums.expect_values()
        job.expecting += 1
        self._tell_all()
        if self._rank == 0:
            all_expect = lambda: True if job.expecting == job.settings.processes else None  # noqa: E731
            yield from self._wait_for(all_expect, "all workers")
            self._sums.send_values(dict(enumerate(self._weights)))
            self.process.ask_all()
        for index, weight in enumerate(self._weights):
            yield from self._ended_round(index, -1)
            weight.copy_(self._sums.mean(index, 0))

    def _iterate(self, iteration: int) -> Waits:
        sums, workers = self._sums, self._job.settings.workers
        for node in workers.nodes(self._rank):
            for index in reversed(range(len(self._weights))):
                yield self._random.random() * 0.004
                own = _sum_of(node, workers.count, self._weights[index], iteration)
                sums.fill(index, own)
                self.process.ask_all()
                self._check_memory()
        for index, weight in enumerate(self._weights):
            yield from self._ended_round(index, iteration)
            weight -= 0.1 * sums.mean(index, iteration)

    def _ended_round(self, index: int, iteration: int) -> Waits:
        sums = self._sums

        def ask() -> object:
            if all(sums._rounds.has_ended(bucket) for bucket in sums._layout.of[index]):
                return True
            self._peers.check_left(iteration)
            return None

        yield from self._wait_for(ask, f"the sum of tensor {index} in iteration {iteration}")

    def _check_bits(self, iteration: int) -> None:
        found = b"".join(weight.numpy().tobytes() for weight in self._weights)
        if found != self._job.expected[iteration]:
            raise Violation(f"worker {self._rank} has other bits in iteration {iteration}")

    def _check_memory(self) -> None:
        buckets, workers = len(self._sums._layout), self._job.settings.workers
        most = 2 * buckets * (workers.count + self._job.settings.processes)
        queued = max((len(each) for each in self._peers.links._out.boxes.values()), default=0)
        if max(queued, len(self._work)) > most:
            raise Violation(f"{queued} messages of worker {self._rank} wait to be sent")

    def _add(self) -> Waits:
        """What the thread of the sums does."""

        def found() -> object:
            return self._work.popleft() if self._work else (self._closing or None)

        while (work := (yield from self._wait_for(found, "work", RUN_S))) is not True:
            yield self._random.random() * 0.002
            work()
            self.process.ask_all()

    def _leave(self) -> Waits:
        peers = self._peers
        if peers.others:
            finished = self._job.settings.iterations
            peers.send(peers.others, "Finished", finished, payload=b"", priority=LAST)
        peers.links.leave()
        self._closing = True
        yield Question(lambda: True if self._left else None, "its last messages", TIMEOUT_S)

    def _failed(self, error: Exception) -> None:
        self._peers.links.fail(as_server_error(error, "the connections failed"))
        self._ended()

    def _ended(self) -> None:
        self._left = True
        self._peers.links.release()

    def _wait_for(self, question: Any, text: str, timeout_s: float = TIMEOUT_S) -> Waits:
        def ask() -> object:
            answer = question()
            if answer is None:
                self._peers.monitor.check()
            return answer

        return (yield Question(ask, f"worker {self._rank}: {text}", timeout_s))
