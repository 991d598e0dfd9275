"""Poseidon and DDP by turns on the same hosts: time, bytes and processor time of an iteration."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.formulas import LinkBytes, expected
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, Measured, begin, measure
from benchmarks.testbed.memory import check_memory, free_bytes, groups_that_fit, needed_bytes
from benchmarks.testbed.processes import environment
from benchmarks.testbed.tables import Table, megabytes, rate_text
from benchmarks.testbed.template import Template
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings

How = DdpSettings | PoseidonSettings
HEAD = (
    "job",
    "lossy",
    "iteration s",
    "quartiles",
    "times DDP",
    "times hook",
    "compute",
    "bound s",
    "sent MB",
    "formula MB",
    "work CPU s",
    "work kernel s",
    "shard CPU s",
    "shard kernel s",
)
LOSS = "loss"
"""The further column of nets that are computed."""
LAST_LOSSES = 10
"""The iterations whose mean loss is told."""
COMPUTED_READING = (
    "The net is computed, on one thread a host. 'one process' trains alone, without an exchange; "
    "'compute' is its time as a part of a job's, and 'bound s' has it too. 'loss' is the mean of "
    f"the last {LAST_LOSSES} iterations that all jobs have made. "
)
EMULATED_READING = "'compute' is the part of the time that is emulated compute. "
READING = (
    "Ours come first, the slowest on top, then DDP's. 'iteration s' is the median over the rounds "
    "of the mean iteration; "
    "'quartiles' are taken over the rounds. 'lossy' is yes if the weights differ from plain DDP's: "
    "a codec or a "
    "communication hook rounds gradients, approximates them, or weights are exchanged every few "
    "iterations. 'times DDP' is "
    "how many times as fast as plain DDP's best a job is, 'times hook' how many times as fast as "
    "the fastest hook. Codecs and hooks compute on this machine's "
    "processors. 'bound s' is "
    "the greater of the compute time and the formula's bytes at the links' rate: no exchange that "
    "moves those bytes can be "
    "faster. MB are counted for an iteration, over the busiest host's link in one direction; with "
    "local steps a round's are "
    "divided by its iterations. CPU and kernel seconds are the processors' time in one iteration, "
    "all hosts together: divided "
    "by this machine's processors they bound the iteration too, since all hosts share them."
)
MEASURES_LINKS = ("auto",)
"""Exchanges that start on links of the rate at which they are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison.

    Attributes:
        title: of the tables, without the rate.
        training: the net, its batch and its compute time.
        workers: hosts that work.
        rates_mbit: of the links, one table each; None: unshaped.
        ours: Poseidon's jobs.
        with_ddp: whether DDP without hooks is measured.
        hooks: DDP's communication hooks, as `hooks.Hook` parses them.
        buckets_mb: bucket sizes of plain DDP besides its default.
        effort: the number of rounds and iterations.
        limit_s: no job starts later than this after the first; the tables have those that did.
    """

    title: str
    training: TrainingSettings
    workers: int
    rates_mbit: tuple[float | None, ...]
    ours: tuple[PoseidonSettings, ...]
    with_ddp: bool = True
    hooks: tuple[str, ...] = ()
    buckets_mb: tuple[float, ...] = (1.0, 5.0, 25.0)
    effort: Effort = field(default_factory=Effort)
    limit_s: float = math.inf

    @property
    def jobs(self) -> list[How]:
        """All jobs in the order of their start: a computed net in one process, plain DDP, then
        ours and the hooks in turn.
        """
        alone = [DdpSettings(alone=True)] if self.training.computed else []
        plain = [DdpSettings(), *(DdpSettings(bucket_mb=size) for size in self.buckets_mb)]
        hooks = [DdpSettings(hook=hook) for hook in self.hooks]
        in_turn = [how for pair in zip_longest(self.ours, hooks) for how in pair if how is not None]
        return [*alone, *(plain if self.with_ddp else ()), *in_turn]

    @property
    def servers(self) -> int:
        """Hosts beside those that work."""
        return max((how.servers for how in self.ours), default=0)


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
        """Whether the weights differ from plain DDP's by more than rounding."""
        return bool(self.how.hook) if isinstance(self.how, DdpSettings) else self.how.lossy

    @property
    def ours(self) -> bool:
        """Whether the job is Poseidon's."""
        return isinstance(self.how, PoseidonSettings)

    @property
    def plain_ddp(self) -> bool:
        """Whether the job is DDP without a hook."""
        return isinstance(self.how, DdpSettings) and not (self.how.hook or self.how.alone)

    @property
    def alone(self) -> bool:
        """Whether it is one process."""
        return isinstance(self.how, DdpSettings) and self.how.alone


def compare(comparison: Comparison, report: Callable[[str], None]) -> list[Table]:
    """Measure one comparison. Return a table for each rate.

    Jobs that fit this machine's memory together live together and are measured by turns; otherwise
    they form several groups. With several rates a job that measures its links has a group of its
    own for each. A computed net starts from its first weights at each rate, so that all jobs train
    from the same weights.

    A failure, SIGINT or SIGTERM after the first tables' rows ends the comparison; what was finished
    is returned.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    training, workers = comparison.training, comparison.workers
    if training.computed and len(comparison.rates_mbit) > 1:
        each = [replace(comparison, rates_mbit=(rate,)) for rate in comparison.rates_mbit]
        return [table for one in each for table in compare(one, report)]
    jobs = comparison.jobs
    check_memory(
        training, [max(jobs, key=lambda how: needed_bytes(training, how, workers))], workers
    )
    found: dict[float | None, list[Row]] = {rate: [] for rate in comparison.rates_mbit}
    apart = [how for how in jobs if _measures_links(how)] if len(comparison.rates_mbit) > 1 else []
    anywhere = [how for how in jobs if how not in apart]
    groups: list[tuple[Sequence[How], Sequence[float | None]]] = [
        (group, comparison.rates_mbit)
        for group in groups_that_fit(training, anywhere, workers, most_bytes=free_bytes())
    ]
    groups[1:1] = [([how], (rate,)) for how in apart for rate in comparison.rates_mbit]
    end_s = time.monotonic() + comparison.limit_s
    for group, rates in groups:
        if time.monotonic() >= end_s:
            report(f"no time is left for {len(group)} jobs")
            continue
        try:
            _measure_group(comparison, group, rates, found, report)
        except (TestbedError, KeyboardInterrupt, SystemExit) as error:
            # SIGTERM too: a measurement is long
            if not any(found.values()):
                raise
            report(
                "stopped, the tables have the jobs that were finished: "
                f"{error or type(error).__name__}"
            )
            break
    return [table(comparison, rate, rows) for rate, rows in found.items()]


def _measures_links(how: How) -> bool:
    return isinstance(how, PoseidonSettings) and how.exchange in MEASURES_LINKS


def _measure_group(
    comparison: Comparison,
    group: Sequence[How],
    rates_mbit: Sequence[float | None],
    found: dict[float | None, list[Row]],
    report: Callable[[str], None],
) -> None:
    """Measure jobs that live together, by turns at each rate. Add their rows to `found`.

    They start on unshaped links, which shortens the start. With a job that measures its links, or
    a computed net, all start at the rate.
    """
    training, workers = comparison.training, comparison.workers
    at_rate = bool(training.computed) or any(map(_measures_links, group))
    slow = rates_mbit[0] if at_rate else None
    with (
        Hosts(workers + comparison.servers, rate_mbit=slow) as hosts,
        Template(environment()) as template,
        ExitStack() as stack,
    ):
        jobs = []
        for how in group:
            servers = how.servers if isinstance(how, PoseidonSettings) else 0
            job = HostJob(hosts[: workers + servers], training, how, template=template)
            report(f"{job.name} starts")
            jobs.append(stack.enter_context(job))
        begin(jobs, comparison.effort)
        for rate in rates_mbit:
            report(f"{' and '.join(job.name for job in jobs)} by turns, {rate_text(rate)}")
            hosts.shape(rate)
            measured = measure(hosts, jobs, comparison.effort, report, begun=True)
            found[rate] += [
                Row(how=how, measured=each, formula=expected(training, how, workers))
                for how, each in zip(group, measured, strict=True)
            ]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return one process, then ours, the slowest first, then plain DDP, then its hooks,
    likewise.
    """

    def place(row: Row) -> tuple[int, float]:
        kind = 0 if row.alone else 1 if row.ours else 2 if row.plain_ddp else 3
        return kind, -row.measured.median_s

    return sorted(rows, key=place)


def table(comparison: Comparison, rate_mbit: float | None, found: Sequence[Row]) -> Table:
    """Return the table of jobs that were measured at one rate."""
    found = in_order(found)
    ddp = min((row.measured.median_s for row in found if row.plain_ddp), default=None)
    others = [row for row in found if not (row.ours or row.plain_ddp or row.alone)]
    hook = min((row.measured.median_s for row in others), default=None)
    training = comparison.training
    if alone := [row.measured.median_s for row in found if row.alone]:
        training = replace(training, compute_s=alone[0])
    losses = _losses(found)
    facts = [
        {
            "job": row.measured.name,
            "lossy": row.lossy,
            "rate_mbit": rate_mbit,
            "workers": comparison.workers,
            "compute_s": training.compute_s,
            "seconds": row.measured.seconds,
            "median_s": row.measured.median_s,
            "quartiles_s": row.measured.quartiles_s,
            "ddp_over_this": ddp / row.measured.median_s if ddp else None,
            "hook_over_this": hook / row.measured.median_s if hook else None,
            "compute_part": training.compute_s / row.measured.median_s,
            "formula_bytes": row.formula.busiest,
            "sent_bytes": row.measured.sent_bytes,
            "received_bytes": row.measured.received_bytes,
            "cpu_s": statistics.median(split.total_s for split in row.measured.split),
            "loss": loss,
        }
        for row, loss in zip(found, losses, strict=True)
    ]
    rows = [_cells(training, rate_mbit, row, ddp, hook) for row in found]
    if training.computed:
        rows = [(*cells, f"{loss:.4f}") for cells, loss in zip(rows, losses, strict=True)]
    return Table(
        title=f"{comparison.title}, {rate_text(rate_mbit)}",
        head=(*HEAD, LOSS) if training.computed else HEAD,
        rows=tuple(rows),
        reading=(COMPUTED_READING if training.computed else EMULATED_READING) + READING,
        facts=tuple(facts),
    )


def _losses(found: Sequence[Row]) -> list[float | None]:
    """Return the mean loss of the last iterations that all jobs have made, by job; None where there
    are none.
    """
    common = min((len(row.measured.losses) for row in found), default=0)
    kept = [row.measured.losses[max(0, common - LAST_LOSSES) : common] for row in found]
    return [statistics.fmean(losses) if losses else None for losses in kept]


def bound_s(training: TrainingSettings, formula: LinkBytes, rate_mbit: float | None) -> float:
    """Return the least seconds of an iteration: compute, or the busiest link's bytes at its
    rate.
    """
    wire_s = 0.0 if rate_mbit is None else formula.busiest * 8 / (rate_mbit * 1e6)
    return max(training.compute_s, wire_s)


def _cells(
    training: TrainingSettings,
    rate_mbit: float | None,
    row: Row,
    ddp: float | None,
    hook: float | None,
) -> tuple[str, ...]:
    measured = row.measured

    def part(name: str) -> str:
        return f"{statistics.median(getattr(split, name) for split in measured.split):.2f}"

    return (
        measured.name,
        "yes" if row.lossy else "no",
        f"{measured.median_s:.3f}",
        "{:.3f} to {:.3f}".format(*measured.quartiles_s),
        f"{ddp / measured.median_s:.2f}" if ddp else "-",
        f"{hook / measured.median_s:.2f}" if hook else "-",
        f"{training.compute_s / measured.median_s:.0%}",
        f"{bound_s(training, row.formula, rate_mbit):.3f}",
        megabytes(max(measured.sent_bytes)),
        megabytes(row.formula.busiest),
        *(
            part(name)
            for name in ("worker_user_s", "worker_system_s", "shard_user_s", "shard_system_s")
        ),
    )
