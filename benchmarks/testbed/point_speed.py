"""Poseidon and DDP by turns on the same hosts: time, bytes and processor time of an iteration."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.testbed.formulas import LinkBytes, expected
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, Measured, measure
from benchmarks.testbed.memory import check_memory
from benchmarks.testbed.tables import Table, megabytes, rate_text
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings

HEAD = (
    "job",
    "iteration s",
    "spread",
    "DDP / this",
    "bound s",
    "sent MB",
    "formula MB",
    "work CPU s",
    "work kernel s",
    "shard CPU s",
    "shard kernel s",
)
READING = (
    "'iteration s' is the median over the rounds of the mean iteration; 'spread' how far the rounds lie apart. "
    "'DDP / this' is how many times faster than DDP's best a job is. 'bound s' is the greater of the compute time and the "
    "formula's bytes at the links' rate: no exchange that moves those bytes can be faster. MB go over the busiest host's "
    "link in one direction. CPU and kernel seconds are the processors' time in one iteration, all hosts together: divided "
    "by this machine's processors they bound the iteration too, since all hosts share them."
)
SCREENING = Effort(rounds=1, iterations=2, warm=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison.

    Attributes:
        title: of the table.
        training: the net, its batch and its compute time.
        workers: hosts that work.
        rate_mbit: of the links; None: unshaped.
        ours: Poseidon's exchanges, each compared with DDP.
        buckets_mb: DDP's bucket sizes besides its default; the best is compared.
        effort: the number of rounds and iterations.
    """

    title: str
    training: TrainingSettings
    workers: int
    rate_mbit: float | None
    ours: tuple[PoseidonSettings, ...]
    buckets_mb: tuple[float, ...] = (1.0, 5.0, 25.0)
    effort: Effort = field(default_factory=Effort)


def compare(comparison: Comparison, report: Callable[[str], None]) -> Table:
    """Measure one comparison.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    ddp: list[DdpSettings | PoseidonSettings] = [DdpSettings()]
    servers = max((how.servers for how in comparison.ours), default=0)
    most = max(comparison.ours, key=lambda how: how.servers)
    check_memory(comparison.training, [*ddp, most], comparison.workers)
    found: list[tuple[Measured, LinkBytes]] = []
    with Hosts(comparison.workers + servers, rate_mbit=comparison.rate_mbit) as hosts:
        best = _best_bucket(comparison, hosts, report)
        ddp += [best] if best.bucket_mb is not None else []
        for how in comparison.ours:
            for other in ddp:
                found += _by_turns(comparison, hosts, how, other, report)
    return _table(comparison, found)


def _by_turns(
    comparison: Comparison,
    hosts: Hosts,
    how: PoseidonSettings,
    other: DdpSettings | PoseidonSettings,
    report: Callable[[str], None],
) -> list[tuple[Measured, LinkBytes]]:
    training, workers = comparison.training, comparison.workers
    first = HostJob(hosts[: workers + how.servers], training, how)
    second = HostJob(hosts[:workers], training, other)
    report(f"{first.name} and {second.name} by turns, {rate_text(comparison.rate_mbit)}")
    with first, second:
        measured = measure(hosts, [first, second], comparison.effort, report)
    return list(zip(measured, [expected(training, each, workers) for each in (how, other)], strict=True))


def _best_bucket(comparison: Comparison, hosts: Hosts, report: Callable[[str], None]) -> DdpSettings:
    """Return the fastest of DDP's bucket sizes in a short run of each; the default where none is faster."""
    seconds: dict[DdpSettings, float] = {}
    for how in (DdpSettings(), *(DdpSettings(bucket_mb=size) for size in comparison.buckets_mb)):
        if not comparison.buckets_mb:
            return how
        with HostJob(hosts[: comparison.workers], comparison.training, how) as job:
            (measured,) = measure(hosts, [job], SCREENING)
        seconds[how] = measured.median_s
        report(f"{job.name}: {measured.median_s:.3f} s in a short run")
    return min(seconds, key=lambda how: seconds[how])


def _table(comparison: Comparison, found: Sequence[tuple[Measured, LinkBytes]]) -> Table:
    fastest_ddp = min(measured.median_s for measured, _ in found if measured.name.startswith("DDP"))
    rows = [_row(comparison, measured, formula, fastest_ddp) for measured, formula in found]
    facts = [
        {
            "job": measured.name,
            "rate_mbit": comparison.rate_mbit,
            "workers": comparison.workers,
            "compute_s": comparison.training.compute_s,
            "seconds": measured.seconds,
            "median_s": measured.median_s,
            "ddp_over_this": fastest_ddp / measured.median_s,
            "formula_bytes": formula.busiest,
            "sent_bytes": measured.sent_bytes,
            "received_bytes": measured.received_bytes,
            "cpu_s": statistics.median(split.total_s for split in measured.split),
        }
        for measured, formula in found
    ]
    return Table(title=comparison.title, head=HEAD, rows=tuple(rows), reading=READING, facts=tuple(facts))


def bound_s(training: TrainingSettings, formula: LinkBytes, rate_mbit: float | None) -> float:
    """Return the least seconds of an iteration: compute, or the busiest link's bytes at its rate."""
    wire_s = 0.0 if rate_mbit is None else formula.busiest * 8 / (rate_mbit * 1e6)
    return max(training.compute_s, wire_s)


def _row(
    comparison: Comparison, measured: Measured, formula: LinkBytes, fastest_ddp: float
) -> tuple[str, ...]:
    def part(name: str) -> str:
        return f"{statistics.median(getattr(split, name) for split in measured.split):.2f}"

    return (
        measured.name,
        f"{measured.median_s:.3f}",
        f"{measured.spread:.0%}",
        f"{fastest_ddp / measured.median_s:.2f}",
        f"{bound_s(comparison.training, formula, comparison.rate_mbit):.3f}",
        megabytes(max(measured.sent_bytes)),
        megabytes(formula.busiest),
        *(part(name) for name in ("worker_user_s", "worker_system_s", "shard_user_s", "shard_system_s")),
    )
