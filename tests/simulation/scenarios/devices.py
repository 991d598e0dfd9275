"""Workers whose tensors are on devices that run work late: every carrier, with 1, 2 and 4 devices a
host.

Work runs on a device in an order drawn from the seed (`tests/support/simulated_device.py`), beside
messages that are late and processes that are slow. Checked: no access without an event between, no
wait of a training loop for its device, equal bits of all replicas, and the values that the same job
has on CPUs.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.host import pieces
from poseidon.exchange.kinds import ExchangeKind, Scheme
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import Precision, Rule, RuleKind
from ps_server.network import Network
from tests.simulation.client import SECRET, TIMEOUT_S, serve_shard
from tests.simulation.exchanges import WorkerWire, stand_ins
from tests.simulation.launcher import Primitives
from tests.simulation.network import Fabric
from tests.simulation.processes import Process
from tests.simulation.world import Violation, World
from tests.support.machines import member_on
from tests.support.simulated_device import TYPE, SimulatedDevice, simulated_devices

SETTINGS = 127
RUN_S = 4000.0
SHAPES = {"matrix": (3, 5), "wide": (4, 24), "vector": (7,), "idle": (3,), "mean": (4,)}
"""Nothing has a gradient of `idle`; `mean` is of statistics."""
FACTOR_ROWS = 2
HOSTS = ((1,), (2,), (4,), (1, 1), (2, 2), (4, 2), (1, 2))
MOMENTUM, ADAM = Rule(momentum=0.9), Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-2)
CODECS = ("int8", "topk:0.3", "randomk:0.3", "powersgd:1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of, besides its deviations."""

    hosts: tuple[int, ...]
    shards: int
    options: ExchangeOptions
    schemes: tuple[Scheme, ...]
    rule: Rule
    clip: float | None
    iterations: int
    opens_again: bool
    """Whether it goes on from a saved state after the first iterations."""

    @property
    def is_lossy(self) -> bool:
        """Whether something is rounded or encoded on its way."""
        return bool(self.options.compress) or self.options.precision is not Precision.FLOAT32


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"devices {number}")
    hosts = random.choice(HOSTS)
    several = len(hosts) > 1
    kinds = [ExchangeKind.SERVER, ExchangeKind.SERVER]
    if several:
        kinds += [ExchangeKind.FACTORS, ExchangeKind.ALLREDUCE, ExchangeKind.AUTO]
    kind = random.choice(kinds)
    shards = random.choice((1, 2) if several else (0, 1, 2))
    staleness, codec, precision = 0, "", Precision.FLOAT32
    if several and kind is not ExchangeKind.ALLREDUCE:
        staleness = random.choice((0, 0, 0, 2))
    if kind is ExchangeKind.SERVER and shards and not staleness:
        codec = random.choice(("", "", *CODECS))
        if not codec:
            precision = random.choice((Precision.FLOAT32, Precision.FLOAT32, Precision.BFLOAT16))
    schemes: tuple[Scheme, ...] = ()
    if kind is ExchangeKind.AUTO:
        first = Scheme.FACTORS if staleness else random.choice((Scheme.FACTORS, Scheme.ALLREDUCE))
        schemes = (first, Scheme.SERVER, Scheme.SERVER, Scheme.SERVER, Scheme.SERVER)
    return Settings(
        hosts=hosts,
        shards=shards if kind.has_shards else 0,
        options=ExchangeOptions(
            kind=kind,
            staleness=staleness,
            compress=f"wide={codec}" if codec else "",
            precision=precision,
        ),
        schemes=schemes,
        rule=MOMENTUM if staleness else random.choice((MOMENTUM, ADAM)),
        clip=None if codec.startswith("powersgd") else random.choice((None, 0.2)),
        iterations=random.choice((2, 3)),
        opens_again=not staleness and random.random() < 0.25,
    )


class Job:
    """One run: what its workers have in common."""

    def __init__(self, world: World, settings: Settings, folder: str) -> None:
        self.world = world
        self.settings = settings
        self.folder = folder
        self.fabric = Fabric(world, bytes_s=world.stream("rate").choice((1e5, 1e7, 1e9)))
        self.primitives = Primitives(world)
        self.wires: dict[Process, WorkerWire] = {}
        self.shards = [f"shard {index}" for index in range(settings.shards)]
        self.listening: dict[int, str] = {}
        self.values: dict[int, list[np.ndarray]] = {}

    def connect(self, rank: int, own: str) -> Sequence[str]:
        """Exchange addresses; see `Connect`."""
        if self.shards or not own:
            return self.shards
        workers = sum(self.settings.hosts)
        self.listening[rank] = own
        for process in self.wires:
            process.changed = True
            self.world.after(0.001, process.ask_all)
        self.primitives.wait(lambda: len(self.listening) == workers, TIMEOUT_S)
        return [self.listening[other] for other in range(workers)]


def simulate(world: World) -> None:
    """Run a seed."""
    number = world.seed % SETTINGS
    settings = settings_of(number)
    with simulated_devices(sum(settings.hosts), world.seed) as devices:
        found = _run(world, settings, devices)
    first = found[0]
    for rank, values in found.items():
        for name, one, other, cpu in zip(SHAPES, first, values, reference(number), strict=True):
            same = np.allclose(one, other, rtol=1e-5, atol=1e-6)
            if not (same if settings.options.staleness else np.array_equal(one, other)):
                raise Violation(f"worker {rank} ends with other bits of '{name}' than worker 0")
            if not settings.options.staleness and not np.allclose(cpu, other, rtol=0, atol=1e-5):
                raise Violation(f"worker {rank} ends with other values of '{name}' than on CPUs")


@cache
def reference(number: int) -> list[np.ndarray]:
    """Return the values at the end of the undisturbed job on CPUs."""
    return _run(World(number, only=frozenset()), settings_of(number), ())[0]


def _run(
    world: World, settings: Settings, devices: Sequence[SimulatedDevice]
) -> dict[int, list[np.ndarray]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # threads have a mode of their own
        job = Job(world, settings, stack.enter_context(tempfile.TemporaryDirectory(prefix="p")))
        stack.callback(lambda: [thread.close() for thread in world.threads])
        places = stand_ins(job.primitives, job.wires.__getitem__)
        if not settings.is_lossy:  # their blocks have sizes of their own
            places += [(pieces, "LEAST_ELEMENTS", 16), (pieces, "SEGMENT_ELEMENTS", 4)]
        for owner, name, stands_in in places:
            stack.enter_context(patch.object(owner, name, stands_in))
        workers = sum(settings.hosts)
        for index, name in enumerate(job.shards):
            serve_shard(job.fabric, Process(world, name), index, workers)
        processes = [Process(world, f"worker {rank}") for rank in range(workers)]
        for process in processes:
            job.wires[process] = WorkerWire(job.fabric, process)
        threads = [
            job.primitives.thread_in(
                process, partial(_work, job, rank, process, devices), f"rank {rank}"
            )
            for rank, process in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        if not world.run(lambda: not world.open_tasks, RUN_S):
            raise Violation("the job does not end")
        for each in world.threads:
            if each.error is not None:
                raise each.error
    return job.values


def _work(job: Job, rank: int, process: Process, devices: Sequence[SimulatedDevice]) -> None:
    settings = job.settings
    device = torch.device(TYPE, rank) if devices else torch.device("cpu")
    numbers = torch.Generator().manual_seed(rank)
    tensors = [
        Trained(
            name=name,
            tensor=torch.empty(shape).uniform_(-1, 1, generator=numbers).to(device),
            rule=settings.rule,
            factor_rows=FACTOR_ROWS if name == "matrix" else 0,
            statistics=name == "mean",
        )
        for name, shape in SHAPES.items()
    ]
    exchange = build_exchange(
        tensors,
        ExchangeSettings(clip=settings.clip),
        _member(job, rank, process),
        partial(job.connect, rank),
        schemes=settings.schemes,
    ).exchange
    first = 1 if settings.opens_again else 0
    try:
        exchange.open(None)
        if first:
            _open_again(exchange, tensors, rank)
        for iteration in range(first, first + settings.iterations):
            if devices:
                devices[rank].waits.clear()
            _iterate(exchange, tensors, iteration, rank)
            if devices and iteration > first and devices[rank].waits:
                raise Violation(f"the training loop waits: {dict(devices[rank].waits)}")
        exchange.settle()
        job.values[rank] = [trained.tensor.cpu().numpy().copy() for trained in tensors]
    finally:
        exchange.close()


def _member(job: Job, rank: int, process: Process) -> Membership:
    settings = job.settings
    member = member_on(
        rank, settings.hosts, job.folder, shards=settings.shards, options=settings.options
    )
    network = Network(
        rank=rank,
        size=sum(settings.hosts),
        token=SECRET,
        timeout_s=TIMEOUT_S,
        wire=job.wires[process],
    )
    return replace(member, network=network)


def _iterate(exchange: Exchange, tensors: Sequence[Trained], iteration: int, rank: int) -> None:
    """Compute with each tensor, then send the gradients in a different order."""
    exchange.start(iteration, 0.25)
    order = range(len(tensors))
    found = []
    for index in order:
        exchange.wait(index)
        found.append(_gradient(tensors[index], iteration, rank))
    for index in (2, 0, 1, 4):
        if tensors[index].statistics:
            tensors[index].tensor.add_(rank + 1.0)
        elif index in exchange.by_factors:
            u = found[index][:, :FACTOR_ROWS].t() * 0.5
            exchange.begin_factors(index, u.contiguous(), found[index][:FACTOR_ROWS] + 0.25)
            exchange.release(index)
        else:
            exchange.begin(index, found[index])
    del found
    exchange.finish()


def _gradient(trained: Trained, iteration: int, rank: int) -> Tensor:
    return trained.tensor.detach() * (0.5 + rank / 8) + (iteration - 0.75)


def _open_again(exchange: Exchange, tensors: Sequence[Trained], rank: int) -> None:
    """Go on from a saved state after one iteration; rank 0 has its values."""
    exchange.settle()
    for trained in tensors:
        trained.tensor.mul_(0.5 - rank)
    histories = [
        [np.full(t.tensor.shape, 0.125, np.float32)] * len(h)
        for t, h in zip(tensors, exchange.state.histories().values(), strict=True)
    ]
    exchange.open(histories, 1)
