"""`poseidon doctor`: examine this machine, or the hosts of a machinefile and all links between
them.

poseidon doctor
poseidon doctor --hostfile=machinefiles/four_nodes.example
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from poseidon.cli.progress import progress_bar
from poseidon.cluster import host_probe
from poseidon.cluster.doctor.findings import Severity, judge
from poseidon.cluster.doctor.report import survey_fields, survey_lines
from poseidon.cluster.doctor.session import Subject, this_machine
from poseidon.cluster.doctor.survey import ASKING, MEASURING, examine
from poseidon.cluster.host_checks import HostCheck, HostFacts, HostNeeds, ask_hosts, request
from poseidon.cluster.machinefile import Host, is_loopback, read_machinefile
from poseidon.cluster.name_lookup import addresses_of
from poseidon.cluster.remote_python import RemotePython
from poseidon.cluster.ssh.config import SshConfig, SshSettings
from poseidon.cluster.ssh.connections import SshConnection, close_all, connect_each, reached
from poseidon.errors import JobError, UsageError
from poseidon.launch.site import launcher_environment
from poseidon.launch.ssh_site import NAMES_S, names_of

OUTPUT = "output"
UNITS = {ASKING: "host", MEASURING: "round"}


def run(arguments: argparse.Namespace) -> int:
    """Examine, print what was found, return 1 if a job cannot run.

    Raises:
        UsageError: --seconds is not positive.
        MachinefileError: a line is wrong.
    """
    if not 0 < arguments.seconds <= 60:
        raise UsageError(f"--seconds must be above 0 and at most 60, not {arguments.seconds:g}")
    hosts = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    problems: list[tuple[str, str]] = []
    if all(is_loopback(host.address) for host in hosts):
        found = _here(hosts, problems)
    else:
        found = over_ssh(hosts, SshSettings.from_flag(arguments.ssh_config), problems)
    with progress_bar(arguments.progress, UNITS) as report, found as subjects:
        survey = examine(subjects, seconds=arguments.seconds, report=report)
    survey = replace(survey, problems=(*problems, *survey.problems))
    findings = judge(survey)
    if arguments.json:
        print(json.dumps(survey_fields(survey, findings), indent=1))
    else:
        print("\n".join(survey_lines(survey, findings)))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _here(
    hosts: Sequence[Host], problems: list[tuple[str, str]]
) -> AbstractContextManager[Sequence[Subject]]:
    """Check this machine as a job would; add what is wrong to `problems`."""
    needs = [_needs(host, (host.address,)) for host in hosts] or [
        HostNeeds(id=0, addresses=("127.0.0.1",), folders=(OUTPUT,))
    ]
    answer = host_probe.answer(request(needs, _description_of(())))
    problems += [("this machine", problem) for problem in answer["problems"]]
    return this_machine(answer["description"])


def _needs(host: Host, addresses: tuple[str, ...]) -> HostNeeds:
    ports = (host.port,) if host.port and host.serves else ()
    return HostNeeds(id=host.id, addresses=addresses, ports=ports, folders=(OUTPUT,))


def _description_of(hosts: Sequence[Host]) -> dict[str, object]:
    """Return what the description of a host needs, see `host_checks.request`."""
    return {"folder": OUTPUT, "names": list(dict.fromkeys(host.address for host in hosts))}


@contextmanager
def over_ssh(
    hosts: Sequence[Host], settings: SshSettings, problems: list[tuple[str, str]]
) -> Iterator[Sequence[Subject]]:
    """Connect to the hosts and check them as a job would; add what is wrong to `problems`."""
    outcomes = connect_each(hosts, settings)
    connections = reached(outcomes)
    try:
        config = SshConfig(settings)
        for host in hosts:
            outcome = outcomes[host.id]
            if isinstance(outcome, JobError):
                label = config.endpoint(host).label
                problems.append((label, str(outcome).removeprefix(f"{label}: ")))
        yield _subjects(
            [host for host in hosts if host.id in connections], connections, config, problems
        )
    finally:
        close_all(set(connections.values()))


def _subjects(
    hosts: Sequence[Host],
    connections: dict[int, SshConnection],
    config: SshConfig,
    problems: list[tuple[str, str]],
) -> list[Subject]:
    dialled = {host.id: config.endpoint(host).host for host in hosts}
    known = addresses_of({*dialled.values(), *(host.address for host in hosts)}, NAMES_S)
    own = launcher_environment()
    lines: dict[tuple[SshConnection, RemotePython], list[Host]] = {}
    for host in hosts:
        lines.setdefault((connections[host.id], RemotePython.of(host, own)), []).append(host)
    checks = [
        HostCheck(
            connection=connection,
            interpreter=python.command(),
            needs=tuple(_needs(host, names_of(host, dialled[host.id], known)) for host in clients),
            describe=_description_of(hosts),
        )
        for (connection, python), clients in lines.items()
    ]
    answers, found = ask_hosts(checks)
    problems += found

    def subject(
        connection: SshConnection, python: RemotePython, clients: Sequence[Host], answer: HostFacts
    ) -> Subject:
        return Subject(
            label=connection.label,
            open=lambda arguments: connection.open(python.command(*arguments)),
            clients=tuple(clients),
            address=answer.addresses.get(clients[0].id, ""),
            facts=answer.description,
        )

    return [
        subject(connection, python, clients, answer)
        for ((connection, python), clients), answer in zip(lines.items(), answers, strict=True)
        if answer is not None
    ]
