"""Overlap of communication and computation where both take about as long; with and without
wait-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.testbed.formulas import expected
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, measure
from benchmarks.testbed.memory import check_memory
from benchmarks.testbed.point_speed import bound_s
from benchmarks.testbed.tables import Table, rate_text
from benchmarks.testbed.worker_settings import PoseidonSettings, TrainingSettings

HEAD = (
    "compute / wire",
    "compute s",
    "wire s",
    "bound s",
    "wait-free s",
    "/ bound",
    "not wait-free s",
    "/ bound",
)
READING = (
    "'wire s' is the formula's bytes at the links' rate, 'bound s' the greater of wire and "
    "compute. 'wait-free s' is an "
    "iteration's time with gradients that leave during the backward pass and layers that wait for "
    "their own values only; "
    "the goal is at most 1.15 of the bound. 'not wait-free s', for contrast, sends after the "
    "backward pass and waits for "
    "all values before the forward pass."
)


def measure_overlap(
    training: TrainingSettings,
    how: PoseidonSettings,
    hosts_count: int,
    rate_mbit: float,
    ratios: Sequence[float],
    effort: Effort,
    report: Callable[[str], None],
) -> Table:
    """Measure both ways at each ratio of compute to wire time.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    ways = (how, replace(how, wait_free=False, trace=None))
    check_memory(training, ways, hosts_count)
    formula = expected(training, how, hosts_count)
    wire_s = formula.busiest * 8 / (rate_mbit * 1e6)
    rows, facts = [], []
    for ratio in ratios:
        timed = replace(training, compute_s=ratio * wire_s)
        bound = bound_s(timed, formula, rate_mbit)
        report(f"compute of {ratio:g} x the wire time {wire_s:.3f} s")
        free_way = _traced(how, ratio)
        with Hosts(hosts_count, rate_mbit=rate_mbit) as hosts:
            jobs = [HostJob(hosts, timed, way) for way in (free_way, ways[1])]
            with jobs[0], jobs[1]:
                free, bound_to_end = measure(hosts, jobs, effort, report)
        found = (free.median_s, bound_to_end.median_s)
        cells = [f"{ratio:g}", f"{timed.compute_s:.3f}", f"{wire_s:.3f}", f"{bound:.3f}"]
        cells += [
            text for seconds in found for text in (f"{seconds:.3f}", f"{seconds / bound:.2f}")
        ]
        rows.append(tuple(cells))
        facts.append(
            {
                "ratio": ratio,
                "compute_s": timed.compute_s,
                "wire_s": wire_s,
                "bound_s": bound,
                "wait_free_s": free.seconds,
                "not_wait_free_s": bound_to_end.seconds,
            }
        )
    title = f"Overlap: {how.exchange} on {hosts_count} hosts at {rate_text(rate_mbit)}"
    return Table(title=title, head=HEAD, rows=tuple(rows), reading=READING, facts=tuple(facts))


def _traced(how: PoseidonSettings, ratio: float) -> PoseidonSettings:
    """Return the settings with a trace folder for this ratio, if traces are requested."""
    if how.trace is None:
        return how
    folder = how.trace.absolute() / f"ratio_{ratio:g}"
    folder.mkdir(parents=True, exist_ok=True)
    return replace(how, trace=folder)
