"""Checks before a job starts anywhere: of every host, all problems reported together, and of what the
launcher of many hosts needs on its own machine.

Law: each host checks itself (`poseidon.cluster.host_probe`); this module sends the requests,
compares the answers and formats the error. What a host answers is shown without control
characters.

benchmarks/many_hosts.py has measured what the launcher needs: a connection over SSH has four
threads, and each host is sent the keys and addresses of all others, which the launcher holds.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.host_probe import Check, HostFacts
from poseidon.cluster.process import for_each_host, format_problems
from poseidon.errors import JobError, printable

PROBE_S = 60.0


HostCheck = tuple[RemoteAgent, Check]
"""The agent of a host, and the request."""


def check_hosts(checks: Sequence[HostCheck]) -> Mapping[int, str]:
    """Check all hosts in parallel.

    Returns:
        The address at which each host is reached, by its id.

    Raises:
        JobError: lists the problems of all hosts.
    """
    answers, problems = ask_hosts(checks)
    if problems:
        sentences = [f"{label}: {problem}" for label, problem in problems]
        raise JobError(format_problems(sentences, of=len(checks)))
    return {
        client: address
        for facts in answers
        if facts is not None
        for client, address in facts.addresses.items()
        if address is not None
    }


def ask_hosts(
    checks: Sequence[HostCheck],
) -> tuple[Sequence[HostFacts | None], Sequence[tuple[str, str]]]:
    """Check all hosts in parallel.

    Returns:
        The answer of each host, None if there is none; and all problems, each a host's label and a
        sentence.
    """
    outcomes = for_each_host(
        lambda each: each[0].ask_for(HostFacts, Service.CHECK, each[1], PROBE_S),
        checks,
        name="poseidon host check",
    )
    problems = [
        (agent.label, sentence)
        for (agent, _), outcome in zip(checks, outcomes, strict=True)
        for sentence in _problems(agent, outcome)
    ]
    problems += _unlike(checks, outcomes)
    return [outcome if isinstance(outcome, HostFacts) else None for outcome in outcomes], problems


def _problems(agent: RemoteAgent, outcome: HostFacts | JobError) -> Sequence[str]:
    if isinstance(outcome, JobError):
        return [str(outcome).removeprefix(f"{agent.label}: ")]
    return [printable(problem) for problem in outcome.problems]


def _unlike(
    checks: Sequence[HostCheck], outcomes: Sequence[HostFacts | JobError]
) -> list[tuple[str, str]]:
    """Return a problem for each host whose torch is not the first one's: sums differ in the last
    bits, or messages.
    """
    known = [
        (agent.label, printable(outcome.torch).partition("+")[0])
        for (agent, _), outcome in zip(checks, outcomes, strict=True)
        if isinstance(outcome, HostFacts) and outcome.torch
    ]
    return [
        (
            label,
            f"torch {torch} is installed there, and {known[0][1]} on {known[0][0]}; install the "
            "same version",
        )
        for label, torch in known[1:]
        if torch != known[0][1]
    ]


THREADS, THREADS_OF_A_HOST = 100, 4
FILES, FILES_OF_A_HOST = 100, 2
BYTES_OF_A_HOST, BYTES_OF_A_PAIR = 150 << 10, 300
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this process may have; None: as much as it wants.

    Attributes:
        threads: and processes, with all others that count.
        files: open ones, connections included.
        memory_bytes: what is free.
    """

    threads: int | None
    files: int | None
    memory_bytes: int


def own_limits() -> Limits:
    """Return the limits of this process."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads = [] if os.geteuid() == 0 else [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    try:
        most = (_CGROUP / "pids.max").read_text().strip()
    except OSError:
        most = "max"
    threads += [int(most)] if most.isdecimal() else []
    return Limits(
        threads=min((limit for limit in threads if limit >= 0), default=None),
        files=None if files == resource.RLIM_INFINITY else files,
        memory_bytes=psutil.virtual_memory().available,
    )


def limit_problems(hosts: int, processes: int, limits: Limits) -> Sequence[str]:
    """Return a sentence for each limit that is too low; pure.

    Args:
        hosts: of the job, on other machines.
        processes: of the job; each has a log.
        limits: of the launcher.
    """
    threads = THREADS + THREADS_OF_A_HOST * hosts
    files = FILES + FILES_OF_A_HOST * hosts + processes
    memory = hosts * (BYTES_OF_A_HOST + BYTES_OF_A_PAIR * hosts)
    found = []
    if limits.threads is not None and limits.threads < threads:
        found.append(
            f"it needs up to {threads} threads, but may have {limits.threads}; raise `ulimit -u`, "
            "or the container's --pids-limit"
        )
    if limits.files is not None and limits.files < files:
        found.append(
            f"it needs up to {files} open files, but may have {limits.files}; raise the hard limit "
            "(/etc/security/limits.conf, or the container's --ulimit nofile)"
        )
    if limits.memory_bytes < memory:
        found.append(
            f"it needs about {memory >> 20} MiB of memory, but {limits.memory_bytes >> 20} MiB are "
            "free; start the job on a different machine, or with fewer hosts"
        )
    return found


def check_limits(hosts: int, processes: int, limits: Limits | None = None) -> None:
    """Check that this process can launch a job.

    Raises:
        JobError: a limit is too low; says what is needed, and what to do.
    """
    found = limit_problems(hosts, processes, limits or own_limits())
    if found:
        raise JobError(f"the launcher of {hosts} hosts: " + "; and ".join(found))
