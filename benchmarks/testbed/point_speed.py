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
    "lossy",
    "iteration s",
    "spread",
    "DDP / this",
    "hook / this",
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
    "'lossy' is yes if the weights are not those of plain DDP: a communication hook of DDP rounds gradients, approximates "
    "them or averages weights every few iterations. 'DDP / this' is how many times faster than plain DDP's best a job is, "
    "'hook / this' how many times faster than the fastest hook. Hooks compute on this machine's processors. 'bound s' is the greater of the compute time and the "
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
        hooks: DDP's communication hooks, each compared with ours, as `hooks.Hook` parses them.
        buckets_mb: DDP's bucket sizes besides its default; the best is compared.
        effort: the number of rounds and iterations.
    """

    title: str
    training: TrainingSettings
    workers: int
    rate_mbit: float | None
    ours: tuple[PoseidonSettings, ...]
    hooks: tuple[str, ...] = ()
    buckets_mb: tuple[float, ...] = (1.0, 5.0, 25.0)
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured job.

    Attributes:
        how: the system.
        measured: its times and bytes.
        formula: the bytes that it must move.
    """

    how: DdpSettings | PoseidonSettings
    measured: Measured
    formula: LinkBytes

    @property
    def lossy(self) -> bool:
        """Whether the weights differ from those of plain DDP by more than rounding."""
        return isinstance(self.how, DdpSettings) and bool(self.how.hook)

    @property
    def plain_ddp(self) -> bool:
        """Whether the job is DDP without a hook."""
        return isinstance(self.how, DdpSettings) and not self.how.hook


def compare(comparison: Comparison, report: Callable[[str], None]) -> Table:
    """Measure one comparison.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    ddp = [DdpSettings(), *(DdpSettings(hook=hook) for hook in comparison.hooks)]
    servers = max((how.servers for how in comparison.ours), default=0)
    most = max(comparison.ours, key=lambda how: how.servers)
    for other in ddp:
        check_memory(comparison.training, [other, most], comparison.workers)
    found: list[Row] = []
    with Hosts(comparison.workers + servers, rate_mbit=comparison.rate_mbit) as hosts:
        best = _best_bucket(comparison, hosts, report)
        ddp[1:1] = [best] if best.bucket_mb is not None else []
        for how in comparison.ours:
            for other in ddp:
                found += _by_turns(comparison, hosts, how, other, report)
    return table(comparison, found)


def _by_turns(
    comparison: Comparison,
    hosts: Hosts,
    how: PoseidonSettings,
    other: DdpSettings,
    report: Callable[[str], None],
) -> list[Row]:
    training, workers = comparison.training, comparison.workers
    first = HostJob(hosts[: workers + how.servers], training, how)
    second = HostJob(hosts[:workers], training, other)
    report(f"{first.name} and {second.name} by turns, {rate_text(comparison.rate_mbit)}")
    with first, second:
        measured = measure(hosts, [first, second], comparison.effort, report)
    return [
        Row(how=each, measured=found, formula=expected(training, each, workers))
        for each, found in zip((how, other), measured, strict=True)
    ]


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


def table(comparison: Comparison, found: Sequence[Row]) -> Table:
    """Return the table of measured jobs."""
    fastest_ddp = min(row.measured.median_s for row in found if row.plain_ddp)
    hooks = [row.measured.median_s for row in found if isinstance(row.how, DdpSettings) and row.how.hook]
    fastest_hook = min(hooks, default=None)
    facts = [
        {
            "job": row.measured.name,
            "lossy": row.lossy,
            "rate_mbit": comparison.rate_mbit,
            "workers": comparison.workers,
            "compute_s": comparison.training.compute_s,
            "seconds": row.measured.seconds,
            "median_s": row.measured.median_s,
            "ddp_over_this": fastest_ddp / row.measured.median_s,
            "hook_over_this": fastest_hook / row.measured.median_s if fastest_hook else None,
            "formula_bytes": row.formula.busiest,
            "sent_bytes": row.measured.sent_bytes,
            "received_bytes": row.measured.received_bytes,
            "cpu_s": statistics.median(split.total_s for split in row.measured.split),
        }
        for row in found
    ]
    return Table(
        title=comparison.title,
        head=HEAD,
        rows=tuple(_cells(comparison, row, fastest_ddp, fastest_hook) for row in found),
        reading=READING,
        facts=tuple(facts),
    )


def bound_s(training: TrainingSettings, formula: LinkBytes, rate_mbit: float | None) -> float:
    """Return the least seconds of an iteration: compute, or the busiest link's bytes at its rate."""
    wire_s = 0.0 if rate_mbit is None else formula.busiest * 8 / (rate_mbit * 1e6)
    return max(training.compute_s, wire_s)


def _cells(
    comparison: Comparison, row: Row, fastest_ddp: float, fastest_hook: float | None
) -> tuple[str, ...]:
    measured = row.measured

    def part(name: str) -> str:
        return f"{statistics.median(getattr(split, name) for split in measured.split):.2f}"

    return (
        measured.name,
        "yes" if row.lossy else "no",
        f"{measured.median_s:.3f}",
        f"{measured.spread:.0%}",
        f"{fastest_ddp / measured.median_s:.2f}",
        f"{fastest_hook / measured.median_s:.2f}" if fastest_hook else "-",
        f"{bound_s(comparison.training, row.formula, comparison.rate_mbit):.3f}",
        megabytes(max(measured.sent_bytes)),
        megabytes(row.formula.busiest),
        *(part(name) for name in ("worker_user_s", "worker_system_s", "shard_user_s", "shard_system_s")),
    )
