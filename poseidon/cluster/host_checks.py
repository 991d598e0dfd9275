"""Checks of every host before a job starts anywhere: all problems are reported together.

Law: each host checks itself (`poseidon.cluster.host_probe`); this module sends the requests,
compares the answers and formats the error. What a host answers is shown without
control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.parallel import for_each_host, format_problems
from poseidon.errors import JobError, printable

PROBE_S = 60.0
SPACE_BYTES = 100 << 20
"""The least free disk space for logs and snapshots."""
_MAX_OUTPUT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededFile:
    """A file or folder that a definition names.

    Attributes:
        name: as the definition has it.
        folder: of the definition, as `poseidon.proto.shipped.portable` returns it.
        instead: names of which any one in the same folder replaces it: `db_3` for the part of
            client 3; empty: itself.
    """

    name: str
    folder: str
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What the processes of a host need.

    Attributes:
        id: of the host in the machinefile.
        addresses: names and addresses at which the others may reach it, best first.
        ports: of its shards; 0 takes any.
        devices: numbers of the GPUs of its workers.
        folders: to write to.
        prefixes: of snapshots, with the folder of the definition that names them.
        files: to read.
        modules: of Python, to import.
    """

    id: int
    addresses: tuple[str, ...]
    ports: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    files: tuple[NeededFile, ...] = ()
    modules: tuple[str, ...] = ()

    def to_fields(self) -> dict[str, object]:
        """Return the needs as they are sent."""
        return {
            "id": self.id,
            "addresses": list(self.addresses),
            "ports": list(self.ports),
            "devices": list(self.devices),
            "folders": list(self.folders),
            "prefixes": [list(prefix) for prefix in self.prefixes],
            "files": [[file.name, file.folder, list(file.instead)] for file in self.files],
            "modules": list(self.modules),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host has answered.

    Attributes:
        python: its interpreter.
        torch: the version, without what follows a `+`; empty when there is none.
        addresses: at which each of its lines in the machinefile is reached, by id.
        problems: a sentence each.
        description: for `poseidon doctor`; empty where none was asked for.
    """

    python: str
    torch: str
    addresses: Mapping[int, str]
    problems: tuple[str, ...]
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """The check of one host.

    Attributes:
        agent: of the host.
        needs: of each of its lines in the machinefile.
        describe: what its description needs, see `request`; None: no description.
    """

    agent: RemoteAgent
    needs: tuple[HostNeeds, ...]
    describe: Mapping[str, object] | None = None


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
        client: address for facts in answers if facts for client, address in facts.addresses.items()
    }


def ask_hosts(
    checks: Sequence[HostCheck],
) -> tuple[Sequence[HostFacts | None], Sequence[tuple[str, str]]]:
    """Check all hosts in parallel.

    Returns:
        The answer of each host, None if there is none; and all problems, each a host's label and a
        sentence.
    """
    outcomes = for_each_host(_run_check, checks, name="poseidon host check")
    problems = [
        (check.agent.label, sentence)
        for check, outcome in zip(checks, outcomes, strict=True)
        for sentence in _problems(check, outcome)
    ]
    problems += _unlike(checks, outcomes)
    return [outcome if isinstance(outcome, HostFacts) else None for outcome in outcomes], problems


def request(
    needs: Sequence[HostNeeds], describe: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return what a host is asked.

    Args:
        needs: of each of its lines in the machinefile.
        describe: the `folder` where jobs write and the `names` to resolve, for the
            host's description; None: no description.
    """
    return {
        "space_bytes": SPACE_BYTES,
        "clients": [each.to_fields() for each in needs],
        **({} if describe is None else {"describe": describe}),
    }


def _problems(check: HostCheck, outcome: HostFacts | JobError) -> Sequence[str]:
    if isinstance(outcome, JobError):
        return [str(outcome).removeprefix(f"{check.agent.label}: ")]
    return outcome.problems


def _unlike(
    checks: Sequence[HostCheck], outcomes: Sequence[HostFacts | JobError]
) -> list[tuple[str, str]]:
    """Return a problem for each host whose torch is not the first one's: sums differ in the last
    bits, or messages.
    """
    known = [
        (check.agent.label, outcome.torch)
        for check, outcome in zip(checks, outcomes, strict=True)
        if isinstance(outcome, HostFacts) and outcome.torch
    ]
    return [
        (
            label,
            f"torch {torch} is installed there, and {known[0][1]} on {known[0][0]}; expected the "
            "same",
        )
        for label, torch in known[1:]
        if torch != known[0][1]
    ]


def _run_check(check: HostCheck) -> HostFacts:
    answer = check.agent.ask(Service.CHECK, request(check.needs, check.describe), PROBE_S)
    try:
        return _facts(answer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(
            f"{check.agent.label}: its answer cannot be read: {str(answer)[:_MAX_OUTPUT]} ({error})"
        ) from error


def _facts(fields: Mapping[str, Any]) -> HostFacts:
    """Validate an answer: anything unexpected raises."""
    addresses = {
        int(client): str(address) for client, address in fields["addresses"].items() if address
    }
    return HostFacts(
        python=str(fields["python"]),
        torch=printable(str(fields["torch"] or "")).partition("+")[0],
        addresses=addresses,
        problems=tuple(printable(str(problem)) for problem in fields["problems"]),
        description=fields.get("description", {}),
    )
