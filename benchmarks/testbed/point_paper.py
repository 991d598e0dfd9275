"""The experiment of the Poseidon paper (USENIX ATC 2017, figure on VGG19-22K), a fortieth of its
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.testbed.hosts import Hosts
from benchmarks.testbed.jobs import HostJob
from benchmarks.testbed.measurement import Effort, measure
from benchmarks.testbed.memory import check_memory
from benchmarks.testbed.shapes import PAPER_SCALE, layers_of
from benchmarks.testbed.tables import Table
from benchmarks.testbed.worker_settings import DdpSettings, PoseidonSettings, TrainingSettings

COMPUTE_S = 0.925
BATCH = 32
RATE_MBIT = 40_000 / PAPER_SCALE
PAPER = {1: 0.99, 2: 1.96, 4: 3.83, 8: 7.63, 16: 15.0, 32: 29.5}
"""Poseidon's speed-ups on Caffe and 40 Gbit/s, by hosts."""
HEAD = ("hosts", "Poseidon 2017", "hybrid", "hybrid s", "ps only", "ps s", "DDP", "DDP s")
READING = (
    "Speed-up over one process: hosts x its iteration / this iteration. Net, batch and rate are "
    "the paper's, divided "
    f"so that every byte is 1/{PAPER_SCALE}: VGG19-22K's matrices with sides shrunk by the root "
    f"of {PAPER_SCALE}, batch "
    f"{BATCH} shrunk likewise, {RATE_MBIT:g} instead of 40 000 Mbit/s; compute is the paper's "
    f"{COMPUTE_S} s, emulated. The "
    "goal is at least the paper's figures. One host: a worker alone needs no server. In every job "
    "the thread that stands for "
    "the accelerator runs before all others, since the hosts share this machine's processors."
)


def paper_training() -> TrainingSettings:
    """Return the paper's net, scaled."""
    return TrainingSettings(
        layers=layers_of("vgg19-22k/40"),
        batch=round(BATCH / math.sqrt(PAPER_SCALE)),
        compute_s=COMPUTE_S,
        steady=True,
    )


def measure_paper(
    host_counts: Sequence[int],
    effort: Effort,
    report: Callable[[str], None],
    rate_mbit: float = RATE_MBIT,
    *,
    in_clear: bool = False,
) -> Table:
    """Measure all sizes.

    Raises:
        TestbedError: it does not fit, or a process failed.
    """
    training = paper_training()
    ways: list[DdpSettings | PoseidonSettings] = [
        PoseidonSettings(in_clear=in_clear),
        PoseidonSettings(exchange="ps", in_clear=in_clear),
        DdpSettings(),
    ]
    report("one process")
    with Hosts(1) as hosts, HostJob(hosts, training, DdpSettings()) as job:
        alone_s = measure(hosts, [job], effort, report)[0].median_s
    rows, facts = [], []
    for count in host_counts:
        report(f"{count} hosts")
        check_memory(training, ways, count)
        with Hosts(count, rate_mbit=rate_mbit) as hosts:
            seconds = _by_turns(hosts, training, ways, effort, report)
        speedups = [count * alone_s / each for each in seconds]
        cells = [str(count), f"{PAPER[count]:.2f}" if count in PAPER else "-"]
        cells += [
            text
            for up, each in zip(speedups, seconds, strict=True)
            for text in (f"{up:.2f}", f"{each:.3f}")
        ]
        rows.append(tuple(cells))
        names = ("hybrid", "ps", "ddp")
        facts.append({"hosts": count, "alone_s": alone_s, **dict(zip(names, seconds, strict=True))})
    title = f"VGG19-22K / {PAPER_SCALE} at {rate_mbit:g} Mbit/s; one process takes {alone_s:.3f} s"
    return Table(title=title, head=HEAD, rows=tuple(rows), reading=READING, facts=tuple(facts))


def _by_turns(
    hosts: Hosts,
    training: TrainingSettings,
    ways: Sequence[DdpSettings | PoseidonSettings],
    effort: Effort,
    report: Callable[[str], None],
) -> list[float]:
    jobs = [HostJob(hosts, training, how) for how in ways]
    with jobs[0], jobs[1], jobs[2]:
        return [measured.median_s for measured in measure(hosts, jobs, effort, report)]
