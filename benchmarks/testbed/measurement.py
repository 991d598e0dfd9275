"""Measuring jobs on the same hosts by turns: A B A B ...

Law: a job's first iterations in each round are not counted (they meet no values on their way), and
no round begins before the links are silent, so that no job pays for another one's bytes. Bytes are
counted over whole rounds, from silence to silence. If a job transfers something every H iterations
only, a round has whole periods of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.testbed.control import Round
from benchmarks.testbed.hosts import Hosts, Traffic
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.processes import CpuTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure.

    Attributes:
        rounds: of each job.
        iterations: that count, in each round.
        warm: that do not, before those.
        warm_ddp: the same of DDP, whose iterations end with their transfers; None: as `warm`.
    """

    rounds: int = 5
    iterations: int = 5
    warm: int = 2
    warm_ddp: int | None = None

    def of(self, job: HostJob) -> Effort:
        """Return the effort of a job in whole periods of its transfers."""

        def whole(iterations: int) -> int:
            return -(-iterations // job.period) * job.period

        warm = whole(self.warm) if job.overlaps else 0
        return replace(self, iterations=whole(self.iterations), warm=whole(warm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Processor time of one iteration, seconds, all hosts together.

    Attributes:
        worker_user_s: workers, in their own code: sums, products, updates.
        worker_system_s: workers, in the kernel: sending and receiving.
        shard_user_s: shards, in their own code.
        shard_system_s: shards, in the kernel.
    """

    worker_user_s: float
    worker_system_s: float
    shard_user_s: float
    shard_system_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.worker_user_s + self.worker_system_s + self.shard_user_s + self.shard_system_s


@dataclass(slots=True, kw_only=True)
class Measured:
    """What was measured of one job.

    Attributes:
        name: of the job.
        seconds: an iteration's time in each round: the mean, since iterations that overlap
            alternate between short and long.
        sent_bytes: per host, of an iteration.
        received_bytes: per host, of an iteration.
        split: processor time of an iteration, by round.
        shard_bytes: of each shard over the whole job.
        losses: of all iterations since the start.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    received_bytes: list[float] = field(default_factory=list)
    split: list[Split] = field(default_factory=list)
    shard_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """An iteration's time: the median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The first and the third quartile of the rounds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """How far the rounds lie apart: (longest - shortest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


def begin(jobs: Sequence[HostJob], effort: Effort) -> None:
    """Run the first round of entered jobs, which does not count: buffers are made, connections
    opened.
    """
    for job in jobs:
        job.round(job.plain_iterations + max(effort.of(job).warm, 1))


def measure(
    hosts: Hosts,
    jobs: Sequence[HostJob],
    effort: Effort,
    report: Callable[[str], None] = lambda _: None,
    *,
    begun: bool = False,
) -> list[Measured]:
    """Measure entered jobs by turns.

    Args:
        hosts: all hosts, also those that a job leaves idle.
        jobs: entered.
        effort: how much.
        report: receives a line for each round.
        begun: whether `begin` has run.

    Returns:
        What was measured, in the order of `jobs`.
    """
    found = [Measured(name=job.name) for job in jobs]
    efforts = [effort.of(job) for job in jobs]
    if not begun:
        begin(jobs, effort)
    traffic: list[list[Traffic]] = [[] for _ in jobs]
    for number in range(effort.rounds):
        for job, measured, moved, own in zip(jobs, found, traffic, efforts, strict=True):
            before, shards = hosts.quiet_traffic(), job.shard_times()
            workers = job.round(own.warm + own.iterations)
            after = hosts.quiet_traffic()
            moved += [new.since(old) for new, old in zip(after, before, strict=True)]
            used = [new.since(old) for new, old in zip(job.shard_times(), shards, strict=True)]
            _note(measured, workers, used, own)
            report(f"  round {number + 1}: {measured.name}: {measured.seconds[-1]:.3f} s")
    for job, measured, moved, own in zip(jobs, found, traffic, efforts, strict=True):
        measured.losses = list(job.losses)
        count = (own.warm + own.iterations) * own.rounds
        measured.sent_bytes = [
            sum(t.sent_bytes for t in moved[h :: len(hosts)]) / count for h in range(len(hosts))
        ]
        measured.received_bytes = [
            sum(t.received_bytes for t in moved[h :: len(hosts)]) / count for h in range(len(hosts))
        ]
    return found


def _note(
    measured: Measured, workers: Sequence[Round], shards: Sequence[CpuTime], effort: Effort
) -> None:
    counted = [seconds for worker in workers for seconds in worker.seconds[effort.warm :]]
    measured.seconds.append(statistics.fmean(counted))
    count = effort.warm + effort.iterations
    measured.split.append(
        Split(
            worker_user_s=sum(statistics.fmean(worker.user_s[effort.warm :]) for worker in workers),
            worker_system_s=sum(
                statistics.fmean(worker.system_s[effort.warm :]) for worker in workers
            ),
            shard_user_s=sum(shard.user_s for shard in shards) / count,
            shard_system_s=sum(shard.system_s for shard in shards) / count,
        )
    )
