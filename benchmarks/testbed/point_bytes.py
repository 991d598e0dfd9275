"""Bytes per host and iteration beside the formula, for each exchange and number of hosts; and
the shards' shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.testbed.formulas import LinkBytes, expected
from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, Measured, measure
from benchmarks.testbed.memory import check_memory
from benchmarks.testbed.tables import Table, megabytes, percent
from benchmarks.testbed.worker_settings import PoseidonSettings, TrainingSettings

HEAD = ("exchange", "hosts", "formula MB", "sent MB", "received MB", "off most", "shards max/mean")
READING = (
    "MB are millions of bytes over one host's link in one iteration and one direction, frames "
    "with their headers, counted "
    "by the link: the mean over the hosts. 'off most' is how far the host and direction that is "
    "furthest from the "
    "formula is from it; the goal is within 2 %. 'shards max/mean' is the bytes of the busiest "
    "shard over the mean; the goal is at most 1.05."
)


def measure_bytes(
    training: TrainingSettings,
    jobs: Sequence[PoseidonSettings],
    host_counts: Sequence[int],
    effort: Effort,
    report: Callable[[str], None],
) -> Table:
    """Run each job on each number of hosts, on unshaped links.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    rows, facts = [], []
    for count in host_counts:
        for how in jobs:
            exchange = how.exchange
            check_memory(training, [how], count)
            report(f"{exchange} on {count} hosts")
            with Hosts(count) as hosts:
                job = HostJob(hosts, training, how)
                with job:
                    (measured,) = measure(hosts, [job], effort, report)
                measured.shard_bytes = job.shard_bytes
            formula = expected(training, how, count)
            rows.append(_row(exchange, count, formula, measured))
            facts.append(_facts(exchange, count, formula, measured))
    return Table(
        title="Bytes per host, iteration and direction",
        head=HEAD,
        rows=tuple(rows),
        reading=READING,
        facts=tuple(facts),
    )


def furthest(measured: Measured, formula: float) -> float:
    """Return the greatest relative distance from the formula among hosts and directions, with
    its sign; 0 where it is 0.
    """
    if not formula:
        return 0.0
    counts = [*measured.sent_bytes, *measured.received_bytes]
    return max((count / formula - 1 for count in counts), key=abs)


def evenness(counts: Sequence[int]) -> float:
    """Max over mean."""
    return max(counts) / statistics.fmean(counts)


def _row(exchange: str, hosts: int, formula: LinkBytes, measured: Measured) -> tuple[str, ...]:
    return (
        exchange,
        str(hosts),
        megabytes(formula.worker),
        megabytes(statistics.fmean(measured.sent_bytes)),
        megabytes(statistics.fmean(measured.received_bytes)),
        percent(furthest(measured, formula.worker)),
        f"{evenness(measured.shard_bytes):.3f}" if any(measured.shard_bytes) else "-",
    )


def _facts(exchange: str, hosts: int, formula: LinkBytes, measured: Measured) -> dict[str, object]:
    return {
        "exchange": exchange,
        "hosts": hosts,
        "formula_bytes": formula.worker,
        "sent_bytes": measured.sent_bytes,
        "received_bytes": measured.received_bytes,
        "shard_bytes": measured.shard_bytes,
    }
