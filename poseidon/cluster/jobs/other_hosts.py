"""Jobs on other hosts: listed and stopped by asking each host, all at once.

Law: a host that cannot be asked does not keep the others from being asked; what is in its way is told. How a host is
asked is handed in (`Ask`): over SSH it is `poseidon.cluster.jobs.over_ssh`. Nothing that a host says reaches a terminal as anything but text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from poseidon.cluster.all_at_once import all_at_once
from poseidon.cluster.jobs.kill import KillPatience
from poseidon.cluster.jobs.this_host import Answer, HostJob
from poseidon.cluster.machinefile import Host, is_loopback
from poseidon.errors import JobError, printable

MOST_AT_ONCE = 64

Ask = Callable[[Host, Mapping[str, object]], Sequence[Answer]]
"""Asks the host of a client a request of `poseidon.cluster.jobs.this_host`: the answers, or a JobError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarJob:
    """A job on another host.

    Attributes:
        host: a line of the machinefile for that host.
        seen: the job as that host sees it.
    """

    host: Host
    seen: HostJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What came of stopping jobs on other hosts.

    Attributes:
        counts: how many processes were stopped on each host that was reached.
        problems: what could not be done, a sentence each.
    """

    counts: Mapping[Host, int]
    problems: tuple[str, ...]


def far_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """One client for each account on another machine, in the order given."""
    found: dict[tuple[str, str | None, int | None], Host] = {}
    for host in hosts:
        if not is_loopback(host.address):
            found.setdefault((host.address.lower(), host.user, host.ssh_port), host)
    return tuple(found.values())


def list_far(hosts: Sequence[Host], ask: Ask) -> tuple[list[FarJob], list[str]]:
    """The jobs of this user on other hosts.

    Args:
        hosts: see `far_hosts`.
        ask: how to ask one.

    Returns:
        The jobs host by host, and what could not be learnt, a sentence each.
    """
    jobs: list[FarJob] = []
    problems: list[str] = []
    for host, answers in _ask_all(hosts, ask, {"do": "list"}, problems):
        for answer in answers:
            if "job" not in answer:
                continue
            try:
                jobs.append(FarJob(host=host, seen=HostJob.from_fields(answer)))
            except JobError as error:
                problems.append(f"{host.address}: {error}")
    return jobs, problems


def kill_far(
    jobs: Sequence[str],
    hosts: Sequence[Host],
    ask: Ask,
    *,
    patience: KillPatience,
    report: Callable[[str], None],
) -> Killed:
    """Stop all processes of jobs on other hosts.

    Args:
        jobs: their ids.
        hosts: see `far_hosts`.
        ask: how to ask one.
        patience: how long to wait, on each host.
        report: hears one line for each process that was stopped.
    """
    request = {
        "do": "kill",
        "jobs": list(jobs),
        "launcher_s": patience.launcher_s,
        "grace_s": patience.grace_s,
    }
    problems: list[str] = []
    counts = {}
    for host, answers in _ask_all(hosts, ask, request, problems):
        stopped = [words for answer in answers if isinstance(words := answer.get("stopped"), str)]
        counts[host] = len(stopped)
        for words in stopped:
            report(f"{host.address}: stopped {printable(words).removeprefix('stopped ')}")
    return Killed(counts=counts, problems=tuple(problems))


def _ask_all(
    hosts: Sequence[Host], ask: Ask, request: Mapping[str, object], problems: list[str]
) -> list[tuple[Host, Sequence[Answer]]]:
    """The answers of those that answered; problems get what the others met and what all of them told of."""
    outcomes = all_at_once(lambda host: ask(host, request), hosts, name="poseidon ask", most=MOST_AT_ONCE)
    answered = []
    for host, outcome in zip(hosts, outcomes, strict=True):
        if isinstance(outcome, JobError):
            problems.append(str(outcome))
            continue
        told = (answer.get("problem") for answer in outcome)
        problems += [f"{host.address}: {printable(words)}" for words in told if isinstance(words, str)]
        if not any(answer.get("end") for answer in outcome):
            problems.append(f"{host.address}: it broke off in the middle of its answer")
        answered.append((host, outcome))
    return answered
