"""`poseidon doctor`: examine this machine, or the hosts of a machinefile and all links between
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import close_agents, opened
from poseidon.cluster.dial.local import dial_here
from poseidon.cluster.dial.ssh import SshDialer, dial_each
from poseidon.cluster.doctor.findings import Severity, judge
from poseidon.cluster.doctor.report import survey_fields, survey_lines
from poseidon.cluster.doctor.survey import ASKING, MEASURING, Subject, examine
from poseidon.cluster.host_checks import ask_hosts
from poseidon.cluster.host_probe import Check, HostNeeds
from poseidon.cluster.machinefile import Host, has_remote_hosts, read_machinefile
from poseidon.cluster.ssh.config import SshConfig
from poseidon.cluster.ssh.settings import SshSettings
from poseidon.errors import JobError, UsageError
from poseidon.launcher.site import launcher_environment

OUTPUT = "output"
UNITS = {ASKING: "host", MEASURING: "round"}


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine, print what was found, return 1 if a job cannot run."""
    if not 0 < arguments.seconds <= 60:
        raise UsageError(f"--seconds must be above 0 and at most 60, not {arguments.seconds:g}")
    hosts = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    problems: list[tuple[str, str]] = []
    if not has_remote_hosts(hosts):
        found = this_machine(hosts, problems)
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


@contextmanager
def this_machine(
    hosts: Sequence[Host], problems: list[tuple[str, str]]
) -> Iterator[Sequence[Subject]]:
    """Check this machine as a job would; add what is wrong to `problems`."""
    needs = tuple(_needs(host, (host.address,)) for host in hosts) or (
        HostNeeds(id=0, addresses=("127.0.0.1",), folders=(OUTPUT,)),
    )
    agent = dial_here()
    try:
        answers, found = ask_hosts([(agent, _check(needs, ()))])
        problems += found
        yield [Subject(agent=agent, facts=answer.description) for answer in answers if answer]
    finally:
        agent.close()


def _needs(host: Host, addresses: tuple[str, ...]) -> HostNeeds:
    ports = (host.port,) if host.port and host.serves else ()
    return HostNeeds(id=host.id, addresses=addresses, ports=ports, folders=(OUTPUT,))


def _check(clients: tuple[HostNeeds, ...], hosts: Sequence[Host]) -> Check:
    names = tuple(dict.fromkeys(host.address for host in hosts))
    return Check(clients=clients, describe=True, folder=OUTPUT, names=names)


@contextmanager
def over_ssh(
    hosts: Sequence[Host], settings: SshSettings, problems: list[tuple[str, str]]
) -> Iterator[Sequence[Subject]]:
    """Connect to the hosts and check them as a job would; add what is wrong to `problems`."""
    outcomes = dial_each(hosts, settings, launcher_environment())
    agents = opened(outcomes)
    try:
        config = SshConfig(settings)
        for host in hosts:
            outcome = outcomes[host.id]
            if isinstance(outcome, JobError):
                label = config.endpoint(host).label
                problems.append((label, str(outcome).removeprefix(f"{label}: ")))
        yield _subjects([host for host in hosts if host.id in agents], agents, settings, problems)
    finally:
        close_agents(agents.values())


def _subjects(
    hosts: Sequence[Host],
    agents: Mapping[int, RemoteAgent],
    settings: SshSettings,
    problems: list[tuple[str, str]],
) -> list[Subject]:
    names = SshDialer(settings, launcher_environment()).names(hosts)
    lines: dict[RemoteAgent, list[Host]] = {}
    for host in hosts:
        lines.setdefault(agents[host.id], []).append(host)
    checks = [
        (agent, _check(tuple(_needs(host, names[host.id]) for host in clients), hosts))
        for agent, clients in lines.items()
    ]
    answers, found = ask_hosts(checks)
    problems += found
    return [
        Subject(
            agent=agent,
            clients=tuple(clients),
            address=answer.addresses.get(clients[0].id) or "",
            facts=answer.description,
        )
        for (agent, clients), answer in zip(lines.items(), answers, strict=True)
        if answer is not None
    ]
