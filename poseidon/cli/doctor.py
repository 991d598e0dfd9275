"""`poseidon doctor`: examine this machine, or the hosts of a machinefile and all links between
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from poseidon.base.text_files import aligned
from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import close_agents, dial_here, opened
from poseidon.cluster.dial.ssh import SshDialer, dial_each
from poseidon.cluster.doctor.findings import (
    Finding,
    Severity,
    format_rate,
    judge,
    link_name,
    worst_link,
)
from poseidon.cluster.doctor.survey import ASKING, MEASURING, HostReport, Subject, Survey, examine
from poseidon.cluster.host_checks import ask_hosts
from poseidon.cluster.host_probe import Check, HostNeeds
from poseidon.cluster.machinefile import Host, SshSettings, has_remote_hosts, read_machinefile
from poseidon.cluster.ssh.config import SshConfig
from poseidon.errors import JobError, UsageError, counted
from poseidon.launcher.site import launcher_environment


def survey_lines(survey: Survey, findings: Sequence[Finding]) -> list[str]:
    """Return the lines that `poseidon doctor` prints."""
    lines = [*_host_table(survey.hosts), *_gpu_lines(survey.hosts), *_link_table(survey)]
    worst = worst_link(survey)
    if worst is not None:
        rate = format_rate(worst.bytes_per_s) if worst.bytes_per_s else "nothing"
        lines += ["", f"The slowest link is {link_name(survey, worst)}: {rate}."]
    lines.append("")
    if not findings:
        return [*lines, "Nothing is wrong."]
    for finding in findings:
        lines.append(f"{finding.severity.value}: {finding.where}: {finding.what}")
        if finding.remedy:
            lines.append(f"    {finding.remedy[0].upper()}{finding.remedy[1:]}.")
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    return [*lines, "", f"{counted(errors, 'error')}, {counted(len(findings) - errors, 'warning')}"]


def survey_fields(survey: Survey, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the survey as JSON has it; rates are bytes a second, times seconds."""
    worst = worst_link(survey)
    return {
        "version": 1,
        "hosts": [asdict(host) for host in survey.hosts],
        "links": [asdict(link) for link in survey.links],
        "slowest_link": [worst.source, worst.target] if worst else None,
        "findings": [
            {**asdict(finding), "severity": finding.severity.value} for finding in findings
        ],
    }


def _host_table(hosts: Sequence[HostReport]) -> list[str]:
    rows = [
        ["host", "python", "torch", "cores", "load", "memory", "GPUs", "files", "disk", "clock"]
    ]
    for host in hosts:
        known = host.facts
        rows.append(
            [
                host.label,
                known["python"],
                known["packages"]["torch"] or "none",
                str(known["cores"]),
                f"{known['load']:.1f}",
                f"{known['memory']['available'] / 2**30:.0f}/{known['memory']['total'] / 2**30:.0f} GiB",
                str(len(known["gpus"] or ())),
                str(known["files"][0]),
                f"{known['free'] / 2**30:.0f} GiB",
                f"{host.clock_offset_s:+.2f} s" if host.address else "-",
            ]
        )
    return aligned(rows)


def _gpu_lines(hosts: Sequence[HostReport]) -> list[str]:
    """Return the driver's description of each host's GPUs, copies each way, and the topology."""
    lines = []
    for host in hosts:
        known = host.facts.get("gpu_system") or {}
        if not known:
            continue
        lines += ["", f"GPUs of {host.label} (NCCL {known['nccl'] or 'unknown'}):"]
        for number, gpu in enumerate(host.facts["gpus"]):
            rates = known["copies"][number] if number < len(known["copies"]) else {}
            copied = [
                f"{rates[way] / 1e9:.1f} GB/s {way}" for way in ("to", "back") if way in rates
            ]
            lines.append(f"  {number}: {gpu}; copies {', '.join(copied) or 'not measured'}")
        lines += [f"  {line}" for line in known["topology"] if line.strip()]
    return lines


def _link_table(survey: Survey) -> list[str]:
    if not survey.links:
        return []
    rows = [["from", "to", "rate", "round trip", "MTU", "largest packet"]]
    for link in survey.links:
        rows.append(
            [
                survey.hosts[link.source].label,
                survey.hosts[link.target].label,
                format_rate(link.bytes_per_s) if link.bytes_per_s else "none",
                "none" if link.rtt_s is None else f"{link.rtt_s * 1e3:.2f} ms",
                str(link.mtu or "?"),
                str(link.largest_packet or "?"),
            ]
        )
    return ["", *aligned(rows)]


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
