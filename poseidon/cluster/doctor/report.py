"""The text of a survey: hosts, links, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from poseidon.base.text_columns import aligned
from poseidon.cluster.doctor.findings import Finding, Severity, format_rate, link_name, worst_link
from poseidon.cluster.doctor.survey import HostReport, Survey
from poseidon.errors import counted


def survey_lines(survey: Survey, findings: Sequence[Finding]) -> list[str]:
    """Return the lines that `poseidon doctor` prints."""
    lines = [*_host_table(survey.hosts), *_link_table(survey)]
    worst = worst_link(survey)
    if worst is not None:
        rate = format_rate(worst.bytes_per_s) if worst.bytes_per_s else "nothing"
        lines += ["", f"The slowest link is {link_name(survey, worst)}: {rate}."]
    lines.append("")
    if not findings:
        return [*lines, "Nothing is wrong."]
    for finding in findings:
        lines.append(f"{finding.severity.value}: {finding.where}: {finding.what}.")
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
