"""The load of each host's link over time, during training: where an iteration leaves links idle."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.testbed.hosts import Hosts, Traffic
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.memory import check_memory
from benchmarks.testbed.tables import Table, rate_text
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings

READING = (
    "Each line is one interval; each number is how busy a host's link was in it, in percent of "
    "its rate: first what the "
    "hosts sent, then what they received. An iteration is as long as the formula's bytes at the "
    "rate where every number is "
    "100; a stretch of small numbers is time that links stood idle, a single large one among them "
    "a host that all wait for."
)


class Sampler:
    """Samples the links at even intervals until it is closed.

    Args:
        hosts: the hosts of the links.
        every_s: the interval.
    """

    def __init__(self, hosts: Hosts, every_s: float) -> None:
        self._hosts = hosts
        self._every_s = every_s
        self._looks = [hosts.traffic()]
        self._times_s = [time.perf_counter()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="testbed-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def busy(self, rate_mbit: float) -> list[tuple[float, list[float], list[float]]]:
        """Return for each interval its end in seconds, and the parts of the rate that each host
        sent and received.
        """
        return [
            busy_between(old, new, began_s, ended_s, self._times_s[0], rate_mbit)
            for old, new, began_s, ended_s in zip(
                self._looks, self._looks[1:], self._times_s, self._times_s[1:], strict=False
            )
        ]

    def _run(self) -> None:
        due_s = self._times_s[0]
        while not self._over.is_set():
            due_s += self._every_s
            self._over.wait(max(0.0, due_s - time.perf_counter()))
            self._looks.append(self._hosts.traffic())
            self._times_s.append(time.perf_counter())


def busy_between(
    old: list[Traffic],
    new: list[Traffic],
    began_s: float,
    ended_s: float,
    zero_s: float,
    rate_mbit: float,
) -> tuple[float, list[float], list[float]]:
    """Return one interval of `Sampler.busy`."""
    possible = (ended_s - began_s) * rate_mbit * 1e6 / 8
    moved = [after.since(before) for before, after in zip(old, new, strict=True)]
    sent = [each.sent_bytes / possible for each in moved]
    return ended_s - zero_s, sent, [each.received_bytes / possible for each in moved]


def measure_links(
    training: TrainingSettings,
    how: DdpSettings | PoseidonSettings,
    workers: int,
    rate_mbit: float,
    *,
    iterations: int,
    every_s: float,
    report: Callable[[str], None],
) -> Table:
    """Run one job and watch its links.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    check_memory(training, [how], workers)
    servers = how.servers if isinstance(how, PoseidonSettings) else 0
    with (
        Hosts(workers + servers, rate_mbit=rate_mbit) as hosts,
        HostJob(hosts, training, how) as job,
    ):
        job.round(2)
        hosts.quiet_traffic()
        report(f"{job.name}: {iterations} iterations")
        sampler = Sampler(hosts, every_s)
        try:
            done = job.round(iterations)
        finally:
            sampler.close()
        name = job.name
    seconds = statistics.fmean(done[0].seconds)
    return Table(
        title=f"Links of {name} on {workers + servers} hosts at {rate_text(rate_mbit)}, "
        f"{seconds:.3f} s an iteration",
        head=(
            "until s",
            *(f"s{host}" for host in range(len(hosts))),
            *(f"r{host}" for host in range(len(hosts))),
        ),
        rows=tuple(
            (f"{end_s:.2f}", *(f"{100 * part:.0f}" for part in (*sent, *received)))
            for end_s, sent, received in sampler.busy(rate_mbit)
        ),
        reading=READING,
        facts=tuple(
            {"until_s": end_s, "sent": sent, "received": received}
            for end_s, sent, received in sampler.busy(rate_mbit)
        ),
    )
