"""Checks of every host before a job starts anywhere: all problems are reported together.

Law: each host checks itself (`poseidon.cluster.host_probe`); this module sends the requests,
compares the answers and formats the error. What a host answers is shown without
control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
