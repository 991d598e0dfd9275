"""What `poseidon plan` measures on the hosts of a machinefile: links between each two hosts, and
the hosts' processors.

Law: links are measured as by `poseidon doctor`. Both measurements together stay within the time
that they are given.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

from poseidon.base.paths import own_command
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.doctor.survey import Report, Subject, Survey, examine
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.process import OutputStream, ProcessSpec, for_each_host
from poseidon.cluster.python_command import module_arguments
from poseidon.errors import JobError, printable
from poseidon.launcher.processes import child_environment
from poseidon.observe.plan.costs import HostCosts, worst

MOST_HOSTS = 8
"""Hosts whose links are measured; more would take too long."""
ROUND_S = 2.0
"""What a round of the link measurement takes besides its transfers."""
LEAST_TRANSFER_S, MOST_TRANSFER_S = 0.1, 0.5
COSTS_S = 6.0
START_S = 120.0
"""How long a busy host may take to import torch, and to measure beyond `COSTS_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLinks:
    """The links between hosts.

    Attributes:
        bits_per_s: of a link in one direction, values without headers if it was measured.
        latency_s: from one host to another.
    """

    bits_per_s: float
    latency_s: float
    measured: bool = True


def transfer_s(hosts: int, limit_s: float) -> float:
    """Return the duration of each transfer, so that all links are measured within a limit if
    that is possible.
    """
    rounds = max(1, hosts - 1 + hosts % 2)
    left_s = (limit_s - COSTS_S) / rounds - ROUND_S
    return min(MOST_TRANSFER_S, max(LEAST_TRANSFER_S, left_s / 2))


def probe_links(subjects: Sequence[Subject], limit_s: float, report: Report) -> NetworkLinks:
    """Measure the links between the first hosts.

    Raises:
        JobError: a host does not answer, or no link can be measured.
    """
    some = subjects[:MOST_HOSTS]
    survey = examine(some, seconds=transfer_s(len(some), limit_s), report=report)
    if survey.problems:
        label, problem = survey.problems[0]
        raise JobError(f"{label}: {problem}")
    return network_of(survey)


def network_of(survey: Survey) -> NetworkLinks:
    """Return the network of a survey: its slowest link, which holds up every synchronous job,
    and the median latency.

    Raises:
        JobError: a link carries nothing; `poseidon doctor` finds the cause.
    """
    broken = next(
        (link for link in survey.links if not link.bytes_per_s or link.rtt_s is None), None
    )
    if broken is not None or not survey.links:
        where = (
            f" from {survey.hosts[broken.source].label} to {survey.hosts[broken.target].label}"
            if broken
            else ""
        )
        raise JobError(
            f"the link{where} cannot be measured; {own_command()} doctor --hostfile finds the cause"
        )
    return NetworkLinks(
        bits_per_s=8 * min(link.bytes_per_s or 0.0 for link in survey.links),
        latency_s=statistics.median(link.rtt_s or 0.0 for link in survey.links) / 2,
    )


def probe_costs(subjects: Sequence[Subject], clients: int | None = None) -> HostCosts:
    """Measure the processors of all hosts at the same time. Return the costs of the slowest.

    Args:
        clients: clients on each of them; None: as many as the machinefile has.

    Raises:
        JobError: a host does not answer.
    """

    def ask(subject: Subject) -> HostCosts:
        request = {"seconds": COSTS_S, "clients": clients or max(1, len(subject.clients))}
        answer = _measured(subject, json.dumps(request), START_S + 4 * COSTS_S)
        try:
            return HostCosts(**{entry.name: answer[entry.name] for entry in fields(HostCosts)})
        except (KeyError, TypeError) as error:
            raise JobError(f"{subject.label}: its answer lacks {error}") from error

    found: list[HostCosts] = []
    for outcome in for_each_host(ask, list(subjects), name="poseidon plan"):
        if isinstance(outcome, JobError):
            raise outcome
        found.append(outcome)
    return worst(found)


def local_costs(clients: int) -> HostCosts:
    """Measure the processors of this machine, while as many clients work on it.

    Raises:
        JobError: they cannot be measured.
    """
    with closing(dial_here()) as agent:
        return probe_costs([Subject(agent=agent)], clients)


def _measured(subject: Subject, request: str, timeout_s: float) -> Mapping[str, Any]:
    """Run `poseidon.observe.plan.costs` on a host, with the environment of a job; return its answer."""
    output = _ProbeOutput()
    name = ProcessName(role=Role.WORKER, index=0, client=0, host=subject.label)
    spec = ProcessSpec(
        name=name,
        argv=(sys.executable, *module_arguments("poseidon.observe.plan.costs", request)),
        environment=child_environment(threads=1),
        first_line=b"",
        own_stdout=True,
    )
    with closing(subject.agent.start(spec, output)):
        if not output.ended.wait(timeout_s):
            raise JobError(f"{subject.label}: its processors were not measured in {timeout_s:g} s")
    try:
        answer = json.loads(output.text[OutputStream.STDOUT].strip().splitlines()[-1])
        if "problem" in answer:
            raise JobError(f"{subject.label}: {printable(str(answer['problem']))}")
        return dict(answer)
    except (ValueError, TypeError, IndexError) as error:
        last = output.text[OutputStream.STDERR].strip().splitlines()[-1:] or ["it wrote no reason"]
        raise JobError(
            f"{subject.label}: its processors cannot be measured: {printable(last[0])}"
        ) from error


class _ProbeOutput:
    """A listener that keeps what a process writes."""

    def __init__(self) -> None:
        self.text = dict.fromkeys(OutputStream, "")
        self.ended = threading.Event()

    def event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """Keep the sentence of a lost host."""
        self.text[OutputStream.STDERR] += f"{event.get('message', '')}\n"

    def output(self, name: ProcessName, stream: OutputStream, text: str) -> None:
        self.text[stream] += text

    def exited(self, name: ProcessName, status: int) -> None:
        self.ended.set()
