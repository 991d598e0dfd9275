"""Comparison of measured and predicted iterations: reads the output of `benchmarks/cluster.py
--json`.

Law: pure. The settings of a measurement are read from its table's title and facts. An error names
the table that does not fit.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.testbed.shapes import layers_of
from benchmarks.testbed.tables import Table
from poseidon.observe.plan.forecast import chosen
from poseidon.observe.plan.iteration import Iteration, auto_scenario, predict
from poseidon.observe.plan.scenario import PlannedExchange, PlannedLowRank, Scenario, WireCodec
from poseidon.observe.plan.shapes import MIB, Machine

UNSHAPED_BITS_PER_S = 100e9
"""Links without a rate are as fast as the processors that carry their bytes."""
SPEED = re.compile(
    r"(?P<net>\S+), batch (?P<batch>\d+), (?P<hosts>\d+) hosts(?: and (?P<servers>\d+) that only "
    r"serve)?, "
    r"compute [\d.]+ ms, .*"
)
OVERLAP = re.compile(
    r"Overlap: (?P<exchange>\w+) on (?P<hosts>\d+) hosts at (?P<rate>[\d.]+) Mbit/s"
)
PAPER = re.compile(r"VGG19-22K / 40 at (?P<rate>[\d.]+) Mbit/s; .*")
DDP = re.compile(r"DDP(?: (?:(?P<half>fp16)|PowerSGD (?P<rank>\d+)))?(?: (?P<bucket>[\d.]+) MB)?")
OURS = re.compile(
    r"(?P<exchange>ps|svb|hybrid|allreduce)(?:\+(?P<codec>int8|float16|bfloat16))?(?:\+powersgd:(?P<rank>\d+))?"
    r"(?:\+H(?P<steps>\d+))?"
    r"(?:\+(?P<codec_after>int8|float16|bfloat16))?(?: \d+ servers)?(?P<late> not wait-free)?"
)
CODECS = {None: None, "int8": WireCodec.INT8, "float16": WireCodec.HALF, "bfloat16": WireCodec.HALF}
PAPER_NET, PAPER_BATCH, PAPER_COMPUTE_S = "vgg19-22k/40", 5, 0.925
HEAD = (
    "job",
    "measured s",
    "predicted s",
    "predicted / measured",
    "measured CPU s",
    "predicted CPU s",
)
READING = (
    "'measured s' is the median of the rounds, 'predicted s' the model's result for the same net, "
    "hosts and links, with "
    "the costs of this machine's processors measured beforehand. The goal is within 15 %. 'CPU s' "
    "are processor seconds of "
    "all hosts together in an iteration; other work on the machine changes them less than the time."
)
CHOICE_HEAD = ("case", "schemes", "recommended", "s", "fastest", "s", "over the fastest")
CHOICE_READING = (
    "Of the measured schemes the one that the predictions recommend, and the one that was "
    "fastest, each with its measured "
    "seconds. The goal is within 5 %."
)

MachineOf = Callable[[int, float | None], Machine]
"""Returns the machine of one host for the number of hosts on this machine and the rate of their
links, Mbit/s; None: no rate.
"""


class ComparisonError(Exception):
    """The table cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured job.

    Attributes:
        label: for people.
        measured_s: seconds of an iteration.
        scenario: the scenario of the job.
        cpu_s: processor seconds of an iteration, all hosts together; None: not known.
        where: the net, hosts and rate.
        job: name of the job.
    """

    label: str
    measured_s: float
    scenario: Scenario
    cpu_s: float | None = None
    where: str = ""
    job: str = ""

    @property
    def lossy(self) -> bool:
        """Whether the weights differ from the weights of one process with all batches."""
        return self.scenario.lossy is not None or self.scenario.local_steps > 1


def compare(
    tables: Sequence[dict[str, Any]],
    machine_of: MachineOf,
    predicted_by: Callable[[Scenario], Iteration],
    *,
    net: str,
    batch: int,
) -> Table:
    """Return a table of every job, measured and predicted.

    Args:
        tables: from `cluster.py --json`.
        machine_of: returns the machine of a host.
        predicted_by: returns an iteration of a scenario.
        net: the net of tables on overlap, whose titles do not name it.
        batch: the batch of these.

    Raises:
        ComparisonError: a table is of a different kind.
    """
    rows, facts = [], []
    for table in tables:
        for case in cases(table, machine_of, net=net, batch=batch):
            predicted = predicted_by(case.scenario)
            ratio = predicted.seconds / case.measured_s
            used = "-" if case.cpu_s is None else f"{case.cpu_s:.2f}"
            times = (f"{case.measured_s:.3f}", f"{predicted.seconds:.3f}", f"{ratio:.2f}")
            rows.append((case.label, *times, used, f"{predicted.cpu_s:.2f}"))
            facts.append(
                {
                    "job": case.label,
                    "measured_s": case.measured_s,
                    "predicted_s": predicted.seconds,
                    "measured_cpu_s": case.cpu_s,
                    "predicted_cpu_s": predicted.cpu_s,
                }
            )
    return Table(
        title="Measured and predicted",
        head=HEAD,
        rows=tuple(rows),
        reading=READING,
        facts=tuple(facts),
    )


def choices(
    tables: Sequence[dict[str, Any]], machine_of: MachineOf, *, net: str, batch: int
) -> Table:
    """Return for each case the measured scheme that the predictions recommend, beside the fastest.

    A case is a net on some hosts at a rate of which several of our schemes were measured: exact
    ones, or lossy ones.

    Args, Raises: see `compare`.
    """
    found: dict[tuple[str, bool], dict[str, Case]] = {}
    for table in tables:
        for case in cases(table, machine_of, net=net, batch=batch):
            if case.job and not DDP.fullmatch(case.job):
                found.setdefault((case.where, case.lossy), {})[case.job] = case
    rows, facts = [], []
    for (where, lossy), by_job in found.items():
        if len(by_job) < 2:
            continue
        jobs = list(by_job.values())
        default = next((index for index, case in enumerate(jobs) if case.job == "hybrid"), None)
        recommended = jobs[chosen([predict(case.scenario) for case in jobs], default)]
        fastest = min(jobs, key=lambda case: case.measured_s)
        over = recommended.measured_s / fastest.measured_s - 1
        kind = "lossy" if lossy else "exact"
        cells = (
            recommended.job,
            f"{recommended.measured_s:.3f}",
            fastest.job,
            f"{fastest.measured_s:.3f}",
        )
        rows.append((where, kind, *cells, f"{over:.0%}"))
        facts.append({"case": where, "schemes": kind, "recommended": recommended.job, "over": over})
    return Table(
        title="Recommended and fastest",
        head=CHOICE_HEAD,
        rows=tuple(rows),
        reading=CHOICE_READING,
        facts=tuple(facts),
    )


def cases(table: dict[str, Any], machine_of: MachineOf, *, net: str, batch: int) -> list[Case]:
    """Return the jobs of one table."""
    title = table["title"]
    if found := SPEED.fullmatch(title):
        return list(_speed(table, found, machine_of))
    if found := OVERLAP.fullmatch(title):
        return list(_overlap(table, found, machine_of, net, batch))
    if found := PAPER.fullmatch(title):
        return list(_paper(table, found, machine_of))
    raise ComparisonError(f"'{title}' is none of the tables of speed, overlap or paper")


def _speed(table: dict[str, Any], found: re.Match[str], machine_of: MachineOf) -> Iterator[Case]:
    hosts, servers = int(found["hosts"]), int(found["servers"] or 0)
    for fact in table["facts"]:
        rate = fact["rate_mbit"]
        scenario = Scenario(
            layers=layers_of(found["net"]),
            batch=int(found["batch"]),
            compute_s=fact["compute_s"],
            workers=hosts,
            servers=servers,
            bits_per_s=rate * 1e6 if rate else UNSHAPED_BITS_PER_S,
            machine=machine_of(hosts + servers, rate),
        )
        job = _by_name(scenario, fact["job"])
        if job is not None:
            on = f"{found['net']}, {hosts}{f' + {servers}' if servers else ''} hosts"
            where = f"{on}, {f'{rate:g} Mbit/s' if rate else 'unshaped'}"
            yield Case(
                label=f"{where}: {fact['job']}",
                measured_s=fact["median_s"],
                scenario=job,
                cpu_s=fact.get("cpu_s"),
                where=where,
                job=fact["job"],
            )


def _by_name(scenario: Scenario, job: str) -> Scenario | None:
    """Return the scenario with a job's own scheme; None for one that the model does not know."""
    if found := DDP.fullmatch(job):
        bucket = int(float(found["bucket"] or 25) * MIB)
        return replace(
            scenario,
            exchange=PlannedExchange.RING,
            lossy=WireCodec.HALF
            if found["half"]
            else PlannedLowRank(rank=int(found["rank"]))
            if found["rank"]
            else None,
            servers=0,
            bucket_bytes=bucket,
            machine=replace(scenario.machine, cores=scenario.machine.cores * _all_hosts(scenario)),
        )
    if job == "auto":
        return auto_scenario(scenario)
    if found := OURS.fullmatch(job):
        name = found["codec"] or found["codec_after"]
        ring = found["exchange"] == "allreduce"
        return replace(
            scenario,
            exchange=PlannedExchange.RING if ring else PlannedExchange(found["exchange"]),
            wait_free=not found["late"],
            lossy=PlannedLowRank(rank=int(found["rank"])) if found["rank"] else CODECS[name],
            local_steps=int(found["steps"] or 1),
        )
    return None


def _all_hosts(scenario: Scenario) -> float:
    """With DDP, hosts that only serve leave their processors to the others."""
    return (scenario.workers + scenario.servers) / scenario.workers


def _overlap(
    table: dict[str, Any], found: re.Match[str], machine_of: MachineOf, net: str, batch: int
) -> Iterator[Case]:
    hosts, rate = int(found["hosts"]), float(found["rate"])
    for fact in table["facts"]:
        for late, name in ((False, "wait_free_s"), (True, "not_wait_free_s")):
            words = "not wait-free" if late else "wait-free"
            yield Case(
                label=f"{net}, {hosts} hosts, compute {fact['ratio']:g} x wire: "
                f"{found['exchange']} {words}",
                measured_s=statistics.median(fact[name]),
                scenario=Scenario(
                    layers=layers_of(net),
                    batch=batch,
                    compute_s=fact["compute_s"],
                    workers=hosts,
                    exchange=PlannedExchange(found["exchange"]),
                    bits_per_s=rate * 1e6,
                    wait_free=not late,
                    machine=machine_of(hosts, rate),
                ),
            )


def _paper(table: dict[str, Any], found: re.Match[str], machine_of: MachineOf) -> Iterator[Case]:
    rate = float(found["rate"])
    for fact in table["facts"]:
        hosts = fact["hosts"]
        for name, exchange in (
            ("hybrid", PlannedExchange.HYBRID),
            ("ps", PlannedExchange.PS),
            ("ddp", PlannedExchange.RING),
        ):
            yield Case(
                label=f"VGG19-22K / 40, {hosts} hosts: {name}",
                measured_s=fact[name],
                scenario=Scenario(
                    layers=layers_of(PAPER_NET),
                    batch=PAPER_BATCH,
                    compute_s=PAPER_COMPUTE_S,
                    workers=hosts,
                    exchange=exchange,
                    bits_per_s=rate * 1e6,
                    machine=machine_of(hosts, rate),
                ),
            )
