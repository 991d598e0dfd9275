"""What is wrong with the hosts of a survey and their links, and what to do about it.

Law: pure. A finding names one cause at one place; the same cause at several links of a host is one
finding.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from poseidon.cluster.doctor.survey import HostReport, LinkReport, Survey

FEWEST_FILES = 1024
FREE_BYTES = 1 << 30
MEMORY_BYTES = 1 << 30
CLOCK_S = 1.0
SLOW = 0.5
"""A link is slow below this part of the usual rate, the third quartile, or of the rate that its
interfaces report.
"""
SURE_BYTES = 2.5e9 / 8
"""Bytes a second that one connection surely carries where the network can: no more is expected."""
LATE = 5.0
"""A round trip above this many times the usual one, the first quartile, is late, if it also takes
`LATE_S`.
"""
LATE_S = 1e-3


class Severity(Enum):
    """What a finding means for a job."""

    ERROR = "error"
    """A job cannot run."""
    WARNING = "warning"
    """A job runs, and slower or less surely than it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        severity: what it means for a job.
        where: a host, or a link as `a -> b`.
        what: a sentence.
        remedy: what to do, a sentence.
    """

    severity: Severity
    where: str
    what: str
    remedy: str


def judge(survey: Survey) -> tuple[Finding, ...]:
    """Return what is wrong: errors first, then warnings, each in the order of hosts and links."""
    found = [
        Finding(severity=Severity.ERROR, where=label, what=problem, remedy="")
        for label, problem in survey.problems
    ]
    for host in survey.hosts:
        found += _of_host(host, several=len(survey.hosts) > 1)
    found += _unlike(survey.hosts)
    found += _clocks(survey.hosts)
    found += _names(survey.hosts)
    found += _ports(survey)
    found += _packets(survey)
    found += _rates(survey)
    found += _latencies(survey)
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.ERROR))


def worst_link(survey: Survey) -> LinkReport | None:
    """Return the link with the lowest rate; one that carries nothing is lower than any.

    None when none was measured.
    """
    measured = [
        link for link in survey.links if link.bytes_per_s is not None or link.rtt_s is not None
    ]
    return min(measured, key=lambda link: link.bytes_per_s or 0.0, default=None)


def link_name(survey: Survey, link: LinkReport) -> str:
    """Return a link in messages: `ml@node1 -> ml@node2`."""
    return f"{survey.hosts[link.source].label} -> {survey.hosts[link.target].label}"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in the unit of network hardware: `941 Mbit/s`."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _warning(where: str, what: str, remedy: str) -> Finding:
    return Finding(severity=Severity.WARNING, where=where, what=what, remedy=remedy)


def _of_host(host: HostReport, *, several: bool) -> Iterator[Finding]:
    known = host.facts

    warning = partial(_warning, host.label)
    torch = known["packages"]["torch"] or ""
    if known["gpus"] and torch.endswith("+cpu"):
        yield warning(
            f"it has {len(known['gpus'])} GPUs, and torch {torch} cannot use them",
            "install a torch with CUDA",
        )
    if known["gpus"] == []:
        yield warning("nvidia-smi finds no GPU", "run nvidia-smi there, and see its message")
    soft, hard = known["files"]
    if 0 <= soft < FEWEST_FILES:
        yield warning(
            f"a process may open {soft} files; connections count as files",
            f"raise the limit to {FEWEST_FILES} or more (now at most {hard}): ulimit -n, or "
            "/etc/security/limits.conf",
        )
    if known["free"] < FREE_BYTES:
        yield warning(
            f"{known['free'] >> 20} MiB are free in {known['folder']}",
            "free some space: a snapshot that does not fit ends the job",
        )
    if known["memory"]["total"] and known["memory"]["available"] < MEMORY_BYTES:
        yield warning(
            f"{known['memory']['available'] >> 20} MiB of memory are available",
            "end the processes that use it: `ps aux --sort=-rss | head`",
        )
    if known["load"] > known["cores"] + 1 and several:
        yield warning(
            f"{known['load']:.0f} processes compute on {known['cores']} cores",
            "look at `top`: a host that is busy slows all others",
        )


def _unlike(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """Find processors whose vector instructions differ from most processors'."""
    vectors = [tuple(host.facts["processor"]["vectors"]) for host in hosts]
    common_vectors = _most_common(vectors)
    for host, own in zip(hosts, vectors, strict=True):
        if own != common_vectors:
            yield _warning(
                host.label,
                f"its processor has {_listed(own)}, and the others have {_listed(common_vectors)}",
                "its forward and backward passes may differ in the last bits",
            )


def _clocks(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """Find clocks that differ from the median clock of the hosts and this machine."""
    if not any(host.address for host in hosts):
        return
    usual = statistics.median([0.0, *(host.clock_offset_s for host in hosts)])
    for host in hosts:
        off = host.clock_offset_s - usual
        if abs(off) - host.clock_error_s > CLOCK_S:
            yield _warning(
                host.label,
                f"its clock is {abs(off):.0f} s {'ahead' if off > 0 else 'behind'}",
                "run a time service (chrony, systemd-timesyncd): logs and traces are "
                "merged by time",
            )


def _names(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """Find names of the machinefile that a host cannot resolve, or takes for its own loopback."""
    for host in hosts:
        unknown = [name for name, found in host.facts["names"].items() if not found]
        if unknown:
            yield _warning(
                host.label,
                f"it cannot resolve {_listed(unknown)}",
                "add the names to its /etc/hosts or DNS, or write addresses in the machinefile",
            )
        looped = [
            name
            for name, found in host.facts["names"].items()
            if found and all(address.startswith("127.") or address == "::1" for address in found)
        ]
        if (
            looped
            and host.address
            and not any(name in ("localhost", "127.0.0.1", "::1") for name in looped)
        ):
            yield _warning(
                host.label,
                f"{_listed(looped)} is a loopback address there",
                "remove the line 127.0.1.1 of its /etc/hosts, or write addresses in the "
                "machinefile",
            )


_MEANING = {
    "timeout": (
        "no answer: a firewall drops the packets",
        "let these ports pass its firewall",
    ),
    "refused": (
        "the connection is refused: a firewall rejects it",
        "let these ports pass its firewall",
    ),
    "unreachable": (
        "the network has no route there",
        "look at the routes (`ip route get`) and the firewall",
    ),
    "other": (
        "a different program answers, or something between them ends the connection",
        "take another port",
    ),
}


def _ports(survey: Survey) -> Iterator[Finding]:
    """Find ports that other hosts cannot reach; one finding for each target and cause."""
    causes: dict[tuple[int, str], dict[int, set[int]]] = {}
    for link in survey.links:
        for port, state in link.ports.items():
            if state != "open":
                causes.setdefault((link.target, state), {}).setdefault(port, set()).add(link.source)
    for (target, state), ports in causes.items():
        host = survey.hosts[target]
        sources = sorted(set().union(*ports.values()))
        all_others = len(sources) == len(survey.hosts) - 1
        senders = (
            "the other hosts" if all_others else _listed([survey.hosts[n].label for n in sources])
        )
        free = [
            port for link in survey.links if link.target == target for port in list(link.ports)[-1:]
        ][:1]
        shown = [
            f"{port} (a free port, as workers take)" if port in free else str(port)
            for port in sorted(ports)
        ]
        meaning, remedy = _MEANING.get(state, (state, "look at the network between them"))
        yield Finding(
            severity=Severity.ERROR,
            where=host.label,
            what=f"{senders} cannot connect to its TCP port {_listed(shown)}: {meaning}",
            remedy=remedy,
        )


def _packets(survey: Survey) -> Iterator[Finding]:
    """Find hosts with an unusual MTU, and links that lose packets of the interface's MTU."""
    mtus = {
        number: _most_common(
            [link.mtu for link in survey.links if link.source == number and link.mtu]
        )
        for number in range(len(survey.hosts))
    }
    common = _most_common([mtu for mtu in mtus.values() if mtu])
    odd = {number for number, mtu in mtus.items() if mtu and mtu != common}
    for number in sorted(odd):
        lost = any(_loses(link) for link in survey.links if number in (link.source, link.target))
        yield _warning(
            survey.hosts[number].label,
            f"its MTU is {mtus[number]}, and the other hosts have {common}"
            + ("; larger packets are lost between them" if lost else ""),
            f"set the same MTU on all hosts and switches: `ip link set dev INTERFACE mtu {common}`",
        )
    for link in survey.links:
        if _loses(link) and not {link.source, link.target} & odd:
            yield _warning(
                link_name(survey, link),
                f"packets of {link.mtu} bytes are lost; the largest that arrive have "
                f"{link.largest_packet}",
                f"set the MTU to {link.largest_packet}, or the switch's MTU to {link.mtu}",
            )


def _loses(link: LinkReport) -> bool:
    return (
        link.mtu is not None and link.largest_packet is not None and link.largest_packet < link.mtu
    )


def _rates(survey: Survey) -> Iterator[Finding]:
    """Find links that carry nothing, and slow ones; all links of a host in one finding."""
    for link in survey.links:
        blocked = link.rtt_s is None and any(state != "open" for state in link.ports.values())
        if link.bytes_per_s is None and not blocked:  # blocked ports are findings already
            yield Finding(
                severity=Severity.ERROR,
                where=link_name(survey, link),
                what=link.problem or "a transfer stops, though single bytes pass",
                remedy="look at MTU and firewall between them",
            )
    measured = [link for link in survey.links if link.bytes_per_s]
    usual = min(_quartile([link.bytes_per_s or 0.0 for link in measured], 3), SURE_BYTES)
    slow = [
        link
        for link in measured
        if (link.bytes_per_s or 0.0) < SLOW * max(usual, _promised(survey, link))
    ]
    of_hosts: list[LinkReport] = []
    for number, host in enumerate(survey.hosts):
        ways = {}
        for verb, end in (("sends", "source"), ("receives", "target")):
            of_host = [link for link in measured if getattr(link, end) == number]
            if len(of_host) > 1 and all(link in slow for link in of_host):
                ways[verb] = of_host
        if ways:
            of_hosts += [link for links in ways.values() for link in links]
            promised = [_promised(survey, link) for links in ways.values() for link in links]
            yield _slow_host(host, ways, max(usual, *promised))
    for link in (link for link in slow if link not in of_hosts):
        expected = format_rate(max(usual, _promised(survey, link)))
        yield _warning(
            link_name(survey, link),
            f"it carries {format_rate(link.bytes_per_s or 0)}; expected about {expected}",
            "look at the cables, switch ports and traffic shaping between them (`ethtool`, "
            "`tc qdisc show`)",
        )


def _slow_host(
    host: HostReport, ways: Mapping[str, Sequence[LinkReport]], expected: float
) -> Finding:
    first = next(iter(host.facts["interfaces"]), "INTERFACE")
    rates = [link.bytes_per_s or 0.0 for links in ways.values() for link in links]
    return _warning(
        host.label,
        f"it {' and '.join(ways)} {format_rate(statistics.median(rates))}; expected about "
        f"{format_rate(expected)}",
        f"look at its cable, its switch port (`ethtool {first}`) and traffic shaping (`tc "
        f"qdisc show dev {first}`)",
    )


def _promised(survey: Survey, link: LinkReport) -> float:
    """Return the bytes a second that both ends' interfaces say they carry, or
    `SURE_BYTES`; 0 where one does not say.
    """
    ends = [
        survey.hosts[number].facts["interfaces"].values() for number in (link.source, link.target)
    ]
    speeds = [max((found["speed"] or 0 for found in end), default=0) for end in ends]
    return min(*speeds, SURE_BYTES * 8 / 1e6) * 1e6 / 8


def _quartile(values: Sequence[float], number: int) -> float:
    return sorted(values)[round(number / 4 * (len(values) - 1))] if values else 0.0


def _latencies(survey: Survey) -> Iterator[Finding]:
    pairs = [link for link in survey.links if link.rtt_s is not None and link.source < link.target]
    if len(pairs) < 3:
        return
    usual = _quartile([link.rtt_s or 0.0 for link in pairs], 1)
    late = [link for link in pairs if (link.rtt_s or 0.0) > max(LATE_S, LATE * usual)]
    for number, host in enumerate(survey.hosts):
        of_host = [link for link in pairs if number in (link.source, link.target)]
        bad = [link for link in of_host if link in late]
        if len(bad) == len(of_host) >= 2:
            late = [link for link in late if link not in bad]
            yield _late(host.label, bad, usual)
    for link in late:
        yield _late(link_name(survey, link), [link], usual)


def _late(where: str, links: Sequence[LinkReport], usual: float) -> Finding:
    trip = statistics.median(link.rtt_s or 0.0 for link in links)
    return _warning(
        where,
        f"a round trip takes {trip * 1e3:.3g} ms, and {usual * 1e3:.3g} ms elsewhere",
        "look for a slow hop (`traceroute`) or a host that is busy",
    )


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0] if values else None


def _listed(parts: Sequence[object]) -> str:
    """Return `a, b and c`."""
    *first, last = [str(part) for part in parts] or ["none"]
    return f"{', '.join(first)} and {last}" if first else last
