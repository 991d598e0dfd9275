"""The cases: jobs, what is injected into each, and what the page has to name.

Law: pure. A case does not depend on the testbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.bottleneck_cases.definitions import Data, NetShape
from poseidon.observe.dashboard.bottleneck import Bottleneck, JobLimit


class Role(Enum):
    """What a client runs, as the machinefile has it."""

    BOTH = "both"
    WORKER = "worker"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A disturbance of a running job, from outside.

    Attributes:
        rate_mbit: the rate of links, Mbit/s each way; 0: as fast as the machine.
        shaped: the clients whose links have that rate.
        slowed: the client whose shard gets a part of a processor; None: none.
        part: that part, 0..1.
        stopped: whether the shard is stopped and continued in turn, instead of a quota.
    """

    rate_mbit: float = 0.0
    shaped: tuple[int, ...] = ()
    slowed: int | None = None
    part: float = 0.1
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job with a known bottleneck.

    Attributes:
        name: in a few words.
        roles: of the clients, one host each.
        exchange: flag.
        workers: of each client.
        flags: more of them.
        shape: of its net.
        injected: into the running job.
        cause: that has to be named.
        where: the worker, shard or host that has to be named; empty: all; None: any.
    """

    name: str
    roles: tuple[Role, ...]
    exchange: str
    workers: int = 1
    flags: tuple[str, ...] = ()
    shape: NetShape = field(default_factory=NetShape)
    injected: Injected = field(default_factory=Injected)
    cause: JobLimit
    where: str | None = ""

    def is_named(self, found: Bottleneck) -> bool:
        """Return whether the page names what was injected."""
        return found.cause is self.cause and self.where in (None, found.where)

    def job(self) -> str:
        """Return the job in short: clients, workers, exchange."""
        serving = self.roles.count(Role.SERVER)
        more = f" + {serving} serving" if serving else ""
        return f"{len(self.roles) - serving} x {self.workers}{more}, {' '.join((self.exchange, *self.flags))}"


def _both(count: int) -> tuple[Role, ...]:
    return (Role.BOTH,) * count


def _served(workers: int, servers: int = 1) -> tuple[Role, ...]:
    return (Role.WORKER,) * workers + (Role.SERVER,) * servers


BIG = {"inputs": 512, "outputs": 512}
"""1 MiB of weights."""
LARGE = {"inputs": 1024, "outputs": 1024}
"""4 MiB of weights."""

CASES: Sequence[Case] = (
    Case(
        name="all workers compute for 150 ms",
        roles=_both(2),
        exchange="ps",
        shape=NetShape(compute_s=0.15),
        cause=JobLimit.COMPUTE,
    ),
    Case(
        name="all workers compute for 100 ms",
        roles=_both(4),
        exchange="hybrid",
        shape=NetShape(compute_s=0.1, **BIG),
        cause=JobLimit.COMPUTE,
    ),
    Case(
        name="all workers compute for 120 ms",
        roles=_both(2),
        workers=2,
        exchange="allreduce",
        shape=NetShape(compute_s=0.12, **BIG),
        cause=JobLimit.COMPUTE,
    ),
    Case(
        name="all workers compute for 100 ms",
        roles=_both(3),
        exchange="svb",
        flags=("--staleness=2",),
        shape=NetShape(compute_s=0.1),
        cause=JobLimit.COMPUTE,
    ),
    Case(
        name="worker 1 computes for 200 ms, the other for 60 ms",
        roles=_both(2),
        exchange="ps",
        shape=NetShape(compute_s=0.06, compute_of={1: 0.2}),
        cause=JobLimit.WORKER,
        where="worker 1",
    ),
    Case(
        name="worker 2 computes for 250 ms, the others for 100 ms",
        roles=_both(4),
        exchange="allreduce",
        shape=NetShape(compute_s=0.1, compute_of={2: 0.25}, **BIG),
        cause=JobLimit.WORKER,
        where="worker 2",
    ),
    Case(
        name="worker 3 computes for 160 ms, the others for 80 ms",
        roles=_both(2),
        workers=2,
        exchange="hybrid",
        shape=NetShape(compute_s=0.08, compute_of={3: 0.16}, **BIG),
        cause=JobLimit.WORKER,
        where="worker 3",
    ),
    Case(
        name="worker 0 computes for 300 ms, the others for 50 ms",
        roles=_both(3),
        exchange="svb",
        flags=("--staleness=3",),
        shape=NetShape(compute_s=0.05, compute_of={0: 0.3}),
        cause=JobLimit.WORKER,
        where="worker 0",
    ),
    Case(
        name="the link of host1 has 20 Mbit/s",
        roles=_both(3),
        exchange="ps",
        shape=NetShape(**BIG),
        injected=Injected(rate_mbit=20, shaped=(1,)),
        cause=JobLimit.LINK,
        where="host1",
    ),
    Case(
        name="the link of host2 has 50 Mbit/s",
        roles=_both(4),
        exchange="allreduce",
        shape=NetShape(**BIG),
        injected=Injected(rate_mbit=50, shaped=(2,)),
        cause=JobLimit.LINK,
        where="host2",
    ),
    Case(
        name="all links have 50 Mbit/s",
        roles=_both(3),
        exchange="svb",
        shape=NetShape(inputs=500, outputs=2000, batch=96),
        injected=Injected(rate_mbit=50, shaped=(0, 1, 2)),
        cause=JobLimit.LINK,
    ),
    Case(
        name="the link between two hosts has 100 Mbit/s",
        roles=_both(2),
        exchange="ps",
        shape=NetShape(**LARGE),
        injected=Injected(rate_mbit=100, shaped=(1,)),
        cause=JobLimit.LINK,
    ),
    Case(
        name="the link of the serving host has 50 Mbit/s",
        roles=_served(3),
        exchange="ps",
        shape=NetShape(**BIG),
        injected=Injected(rate_mbit=50, shaped=(3,)),
        cause=JobLimit.LINK,
        where="host3",
    ),
    Case(
        name="the shard of a serving host has 3 % of a processor",
        roles=_served(2),
        exchange="ps",
        shape=NetShape(**LARGE),
        injected=Injected(slowed=2, part=0.03),
        cause=JobLimit.SHARD,
        where="shard 0",
    ),
    Case(
        name="the shard of one of two serving hosts runs for 10 % of the time",
        roles=_served(2, 2),
        exchange="ps",
        shape=NetShape(**BIG),
        injected=Injected(slowed=3, stopped=True),
        cause=JobLimit.SHARD,
        where="shard 1",
    ),
    Case(
        name="the shard of host1 has 3 % of a processor",
        roles=_both(3),
        exchange="ps",
        shape=NetShape(**LARGE),
        injected=Injected(slowed=1, part=0.03),
        cause=JobLimit.SHARD,
        where="shard 1",
    ),
    Case(
        name="all workers decode large images of a list",
        roles=_both(2),
        exchange="ps",
        shape=NetShape(data=Data.IMAGES),
        cause=JobLimit.DATA,
        where=None,
    ),
    Case(
        name="all workers decode large images of an LMDB",
        roles=_both(1),
        workers=2,
        exchange="hybrid",
        shape=NetShape(data=Data.LMDB),
        cause=JobLimit.DATA,
        where=None,
    ),
    Case(
        name="a layer in Python reads for 100 ms on all workers",
        roles=_both(3),
        exchange="allreduce",
        shape=NetShape(data=Data.PYTHON, read_s=0.1),
        cause=JobLimit.DATA,
        where=None,
    ),
    Case(
        name="a layer in Python reads for 250 ms on worker 1",
        roles=_both(3),
        exchange="svb",
        shape=NetShape(data=Data.PYTHON, compute_s=0.08, read_of={1: 0.25}),
        cause=JobLimit.DATA,
        where="worker 1",
    ),
)
