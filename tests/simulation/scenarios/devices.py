"""Workers whose tensors are on devices that run work late: every carrier, with 1, 2 and 4 devices a
host.

A seed is one iteration of all workers of a job. The job is built, and opened, once for `SEEDS`
iterations that follow each other: to run a seed alone, those before it run too. Each seed draws
anew in which order its work runs on the devices (`tests/support/simulated_device.py`), which of its
messages are late and which processes are slow. What was begun in an iteration may still be under
way in the next one.

Checked: no access without an event between, no wait of a training loop for its device; after each
`CHECKED`th iteration also equal bits of all replicas and, at the beginning of a job, the values
that it has on CPUs. The last seed of a job closes it.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
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
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
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

SETTINGS = 125
SEEDS = 20
"""Of a job."""
CHECKED = 5
COMPARED = 10
"""So many iterations of a job are compared with those on CPUs."""
RUN_S = 4000.0
SHAPES = {"matrix": (3, 5), "wide": (4, 24), "idle": (3,), "mean": (4,)}
"""Nothing has a gradient of `idle`; `mean` is of statistics."""
FACTOR_ROWS = 3
"""The most; the first iterations have fewer."""
HOSTS = (
    *((1,), (1,), (1,), (1,), (2,), (2,), (2,), (2,), (1, 1), (1, 1), (1, 1), (1, 1)),
    *((1, 2), (1, 2), (1, 2), (2, 2), (4,), (4, 2)),
)
"""Small ones more often: they take less time."""
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
    opens_again: bool
    """Whether it begins from a saved state of iteration 1."""

    @property
    def is_lossy(self) -> bool:
        """Whether something is rounded or encoded on its way."""
        return bool(self.options.compress) or self.options.precision is not Precision.FLOAT32


def settings_of(number: int) -> Settings:
    """Return the settings with a number."""
    random = Random(f"devices {number % SETTINGS}")
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
        schemes = (first, Scheme.SERVER, Scheme.SERVER, Scheme.SERVER)
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
        opens_again=not staleness and random.random() < 0.25,
    )


class Job:
    """A job: what its workers have in common."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        folder: str,
        devices: Sequence[SimulatedDevice],
    ) -> None:
        self.world = world
        self.settings = settings
        self.folder = folder
        self.devices = devices
        self.fabric = Fabric(world, bytes_s=world.stream("rate").choice((1e5, 1e7, 1e9)))
        self.primitives = Primitives(world)
        self.wires: dict[Process, WorkerWire] = {}
        self.shards = [f"shard {index}" for index in range(settings.shards)]
        self.listening: dict[int, str] = {}
        self.allowed = 0
        """Iterations that may begin; -1: the job ends."""
        self.ended = [0] * sum(settings.hosts)
        """Iterations of each worker."""
        self.values: dict[int, list[np.ndarray]] = {}
        """Of each worker, after the last iteration that was checked."""

    def connect(self, rank: int, own: str) -> Sequence[str]:
        """Exchange addresses; see `Connect`."""
        if self.shards or not own:
            return self.shards
        self.listening[rank] = own
        self._ask_all()
        self.primitives.wait(lambda: len(self.listening) == len(self.ended), TIMEOUT_S)
        return [self.listening[other] for other in range(len(self.ended))]

    def _ask_all(self) -> None:
        for process in self.wires:
            process.changed = True
            self.world.after(0.001, process.ask_all)

    def go_on(self, seed: int) -> None:
        """Run the next iteration of all workers; `seed` is that of its draws."""
        self.world.vary(f"faults {seed}")
        for number, device in enumerate(self.devices):
            device.draw(1000 * seed + number)
        self.allowed += 1
        self._ask_all()
        self._run(lambda: min(self.ended) == self.allowed)

    def may_begin(self, number: int) -> bool:
        """Wait until an iteration may begin; return False if the job ends."""
        self.primitives.wait(lambda: not 0 <= self.allowed <= number, None)
        return self.allowed >= 0

    def close(self) -> None:
        """Let all workers end."""
        self.allowed = -1
        self._ask_all()
        self._run(lambda: not self.world.open_tasks)

    def _run(self, ended: Callable[[], bool]) -> None:
        has_ended = self.world.run(
            lambda: ended() or any(thread.error for thread in self.world.threads), RUN_S
        )
        for thread in self.world.threads:
            if thread.error is not None:
                raise thread.error
        if not has_ended:
            raise Violation("the job does not end")
        for device in self.devices:
            device.raise_races()


def simulate(world: World) -> None:
    """Run a seed, after those of its job that come before it."""
    number, index = divmod(world.seed, SEEDS)
    world.seed = number
    with closing(seeds_of_job(world, number)) as seeds:
        for _ in itertools.islice(seeds, index + 1):
            pass


def seeds_of_job(world: World, number: int) -> Generator[None, None, None]:
    """Build a job, and run a seed of it for each value that is asked for.

    Args:
        world: a new one, with the job's number as its seed.
    """
    settings = settings_of(number)
    expected = [] if settings.options.staleness else reference(number % SETTINGS)
    with (
        simulated_devices(sum(settings.hosts), number) as devices,
        _opened(world, settings, devices) as job,
    ):
        for index in range(SEEDS):
            job.go_on(number * SEEDS + index)
            if (index + 1) % CHECKED == 0:
                _check(job, expected[index // CHECKED] if index < COMPARED and expected else None)
            if index + 1 == SEEDS:
                job.close()
            yield


def _check(job: Job, expected: list[np.ndarray] | None) -> None:
    """Compare the values of all workers, and with what is expected."""
    stale = job.settings.options.staleness
    for rank, values in job.values.items():
        for at, (name, own) in enumerate(zip(SHAPES, values, strict=True)):
            first = job.values[0][at]
            same = np.allclose(first, own, rtol=1e-5, atol=1e-6)
            if not (same if stale else np.array_equal(first, own)):
                raise Violation(f"worker {rank} has other bits of '{name}' than worker 0")
            if not np.isfinite(own).all():
                raise Violation(f"worker {rank} has read '{name}' too early")
            if expected and not np.allclose(expected[at], own, rtol=0, atol=1e-5):
                raise Violation(f"worker {rank} has other values of '{name}' than on CPUs")


@cache
def reference(number: int) -> list[list[np.ndarray]]:
    """Return the values of the undisturbed job on CPUs, each time that they are checked."""
    settings, found = settings_of(number), []
    with _opened(World(number, only=frozenset()), settings, ()) as job:
        for index in range(COMPARED):
            job.go_on(index)
            if (index + 1) % CHECKED == 0:
                found.append(job.values[0])
    return found


@contextmanager
def _opened(world: World, settings: Settings, devices: Sequence[SimulatedDevice]) -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # threads have a mode of their own
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="p"))
        job = Job(world, settings, folder, devices)
        stack.callback(lambda: [thread.close() for thread in world.threads])
        places = stand_ins(job.primitives, job.wires.__getitem__)
        if not settings.is_lossy:  # their blocks have sizes of their own
            places += [(pieces, "LEAST_ELEMENTS", 16), (pieces, "SEGMENT_ELEMENTS", 4)]
        for owner, name, stands_in in places:
            stack.enter_context(patch.object(owner, name, stands_in))
        for index, name in enumerate(job.shards):
            serve_shard(job.fabric, Process(world, name), index, len(job.ended))
        processes = [Process(world, f"worker {rank}") for rank in range(len(job.ended))]
        for process in processes:
            job.wires[process] = WorkerWire(job.fabric, process)
        threads = [
            job.primitives.thread_in(process, partial(_work, job, rank, process), f"rank {rank}")
            for rank, process in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        yield job


def _work(job: Job, rank: int, process: Process) -> None:
    settings, devices = job.settings, job.devices
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
    try:
        exchange.open(None)
        if settings.opens_again:
            _open_again(exchange, tensors, rank)
        for number in itertools.count():
            if not job.may_begin(number):
                break
            if devices:
                devices[rank].waits.clear()
            _iterate(exchange, tensors, number + settings.opens_again, rank)
            if devices and number and devices[rank].waits:
                raise Violation(f"the training loop waits: {dict(devices[rank].waits)}")
            if (number + 1) % CHECKED == 0:
                exchange.settle()
                job.values[rank] = [trained.tensor.cpu().numpy().copy() for trained in tensors]
            job.ended[rank] += 1
            process.changed = True
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
    for index in (0, 1, 3):
        if tensors[index].statistics:
            tensors[index].tensor.add_(rank + 1.0)
        elif index in exchange.by_factors:
            rows = min(1 + iteration // 8, FACTOR_ROWS)
            u = found[index][:, :rows].t() * 0.5
            v = torch.full_like(found[index][:rows], 0.25 + rank / 8)
            exchange.begin_factors(index, u.contiguous(), v)
            exchange.release(index)
        else:
            exchange.begin(index, found[index])
    del found
    exchange.finish()


def _gradient(trained: Trained, iteration: int, rank: int) -> Tensor:
    return torch.rsub(trained.tensor, iteration % 3 - 0.75, alpha=-0.5 - rank / 8)


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
