"""What `poseidon doctor` concludes from a survey: one finding for a cause, at the place of the
cause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from poseidon.cli.doctor import survey_lines
from poseidon.cluster.doctor.findings import Finding, Severity, format_rate, judge, worst_link
from poseidon.cluster.doctor.survey import HostReport, LinkReport, Survey

GBIT = 1e9 / 8
FACTS: dict[str, Any] = {
    "name": "node", "python": "3.11.2", "executable": "/usr/bin/python3", "packages": {"torch": "2.13.0+cpu"},
    "cores": 8, "load": 0.5, "processor": {"model": "x", "vectors": ["avx2", "fma"]},
    "memory": {"total": 64 << 30, "available": 32 << 30}, "gpus": None, "files": [4096, 4096],
    "folder": "/root", "free": 100 << 30, "names": {"node0": ["10.0.0.1"]},
    "interfaces": {"eth0": {"mtu": 1500, "speed": 1000}},
}  # fmt: skip


def host(number: int, **facts: Any) -> HostReport:
    return HostReport(
        clients=(number,),
        label=f"node{number}",
        address=f"10.0.0.{number + 1}",
        facts={**FACTS, **facts},
    )


def link(source: int, target: int, **more: Any) -> LinkReport:
    known = {
        "ports": {9999: "open", 40000: "open"}, "rtt_s": 1e-4, "bytes_per_s": 0.94 * GBIT, "mtu": 1500,
        "largest_packet": 1500,
    }  # fmt: skip
    return LinkReport(source=source, target=target, **{**known, **more})


def cluster(count: int = 4, **of_link: Any) -> Survey:
    """Return a healthy cluster."""
    hosts = tuple(host(number) for number in range(count))
    return Survey(
        hosts=hosts,
        links=tuple(link(a, b, **of_link) for a in range(count) for b in range(count) if a != b),
    )


def with_links(survey: Survey, chosen: Any, **changes: Any) -> Survey:
    """Return a survey with other measurements where `chosen(link)` holds."""
    links = tuple(replace(each, **changes) if chosen(each) else each for each in survey.links)
    return replace(survey, links=links)


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_cluster_has_no_finding() -> None:
    assert judge(cluster()) == ()
    assert "Nothing is wrong." in survey_lines(cluster(), ())


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_a_host_whose_link_is_slow_is_named_once(count: int) -> None:
    survey = with_links(
        cluster(count), lambda each: 1 in (each.source, each.target), bytes_per_s=0.09 * GBIT
    )
    if count == 2:  # nothing to compare with but the interfaces
        assert {finding.where for finding in judge(survey)} == {"node0 -> node1", "node1 -> node0"}
        return
    finding = only(judge(survey))
    assert finding.where == "node1"
    assert finding.what == "it sends and receives 90 Mbit/s; expected about 1 Gbit/s"
    assert "ethtool eth0" in finding.remedy
    worst = worst_link(survey)
    assert worst is not None
    assert 1 in (worst.source, worst.target)


def test_one_direction_and_one_link_are_told_apart() -> None:
    sends = with_links(cluster(), lambda each: each.source == 2, bytes_per_s=0.1 * GBIT)
    assert only(judge(sends)).what.startswith("it sends 100 Mbit/s")
    single = with_links(
        cluster(), lambda each: (each.source, each.target) == (0, 3), bytes_per_s=0.1 * GBIT
    )
    assert only(judge(single)).where == "node0 -> node3"


def test_a_cluster_that_is_slower_than_its_interfaces_say() -> None:
    slow = cluster(3, bytes_per_s=0.094 * GBIT)  # a switch of 100 Mbit/s
    assert {finding.where for finding in judge(slow)} == {"node0", "node1", "node2"}
    unknown = replace(
        slow,
        hosts=tuple(host(n, interfaces={"eth0": {"mtu": 1500, "speed": None}}) for n in range(3)),
    )
    assert judge(unknown) == (), "nothing says that more can be expected"


def test_a_transfer_that_stops_is_an_error() -> None:
    survey = with_links(
        cluster(), lambda each: (each.source, each.target) == (0, 1), bytes_per_s=None
    )
    finding = only(judge(survey))
    assert (finding.severity, finding.where) == (Severity.ERROR, "node0 -> node1")
    assert worst_link(survey) == survey.links[0]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("timeout", "a firewall drops the packets"),
        ("refused", "a firewall rejects it"),
        ("unreachable", "the network has no route there"),
        ("other", "a different program answers"),
    ],
)
def test_a_closed_port_is_one_error_at_its_host(state: str, text: str) -> None:
    survey = with_links(
        cluster(), lambda each: each.target == 1, ports={9999: state, 40000: "open"}
    )
    finding = only(judge(survey))
    assert (finding.severity, finding.where) == (Severity.ERROR, "node1")
    assert finding.what.startswith("the other hosts cannot connect to its TCP port 9999: ")
    assert text in finding.what
    partly = with_links(
        cluster(),
        lambda each: (each.source, each.target) == (3, 1),
        ports={9999: state, 40000: state},
    )
    assert only(judge(partly)).what.startswith("node3 cannot connect to its TCP port 9999")


def test_a_host_that_no_port_reaches_is_not_reported_as_slow_too() -> None:
    blocked = {"ports": {9999: "timeout", 40000: "timeout"}, "rtt_s": None, "bytes_per_s": None}
    survey = with_links(
        cluster(), lambda each: each.target == 1, **blocked, problem="no port can be reached"
    )
    assert only(judge(survey)).where == "node1"


def test_a_host_with_another_mtu_is_named_and_not_its_links() -> None:
    survey = with_links(cluster(), lambda each: each.source == 2, mtu=1400, largest_packet=1400)
    survey = with_links(survey, lambda each: each.target == 2, largest_packet=1400)
    finding = only(judge(survey))
    assert finding.where == "node2"
    assert (
        finding.what
        == "its MTU is 1400, and the other hosts have 1500; larger packets are lost between them"
    )


def test_a_switch_that_loses_large_packets() -> None:
    survey = with_links(
        cluster(mtu=9000, largest_packet=9000),
        lambda each: each.source == 0 and each.target == 1,
        largest_packet=1500,
    )
    finding = only(judge(survey))
    assert finding.where == "node0 -> node1"
    assert finding.what == "packets of 9000 bytes are lost; the largest that arrive have 1500"


def test_no_datagram_at_all_says_nothing_of_the_mtu() -> None:
    assert judge(cluster(largest_packet=None)) == ()


def test_a_late_host_and_a_late_link() -> None:
    host_late = with_links(cluster(), lambda each: 3 in (each.source, each.target), rtt_s=0.02)
    assert only(judge(host_late)).where == "node3"
    assert only(judge(host_late)).what == "a round trip takes 20 ms, and 0.1 ms elsewhere"
    link_late = with_links(cluster(), lambda each: {each.source, each.target} == {0, 1}, rtt_s=0.02)
    assert only(judge(link_late)).where == "node0 -> node1"


@pytest.mark.parametrize(
    ("offset", "text"), [(60.2, "its clock is 60 s ahead"), (-7.0, "its clock is 7 s behind")]
)
def test_a_wrong_clock(offset: float, text: str) -> None:
    survey = cluster()
    hosts = (*survey.hosts[:3], replace(survey.hosts[3], clock_offset_s=offset, clock_error_s=0.01))
    assert only(judge(replace(survey, hosts=hosts))).what == text


def test_the_clock_of_this_machine_alone_is_no_finding_about_the_hosts() -> None:
    survey = cluster()
    hosts = tuple(replace(each, clock_offset_s=3600.0) for each in survey.hosts)
    assert judge(replace(survey, hosts=hosts)) == ()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"files": [256, 4096]}, "a process may open 256 files"),
        ({"free": 200 << 20}, "200 MiB are free in /root"),
        ({"load": 20.0}, "20 processes compute on 8 cores"),
        ({"gpus": []}, "nvidia-smi finds no GPU"),
        ({"gpus": ["H100", "H100"]}, "it has 2 GPUs, and torch 2.13.0+cpu cannot use them"),
        ({"memory": {"total": 8 << 30, "available": 100 << 20}}, "100 MiB of memory are available"),
        (
            {"processor": {"model": "y", "vectors": ["avx"]}},
            "its processor has avx, and the others have avx2 and fma",
        ),
        ({"names": {"node0": []}}, "it cannot resolve node0"),
        ({"names": {"node0": ["127.0.1.1"]}}, "node0 is a loopback address there"),
    ],
)
def test_facts_of_a_host(facts: dict[str, Any], text: str) -> None:
    survey = cluster(3)
    hosts = (*survey.hosts[:2], host(2, **facts))
    finding = only(judge(replace(survey, hosts=hosts)))
    assert finding.where == "node2"
    assert text in finding.what
    assert finding.remedy


def test_problems_of_hosts_that_did_not_answer_come_first() -> None:
    survey = replace(cluster(2), problems=(("node7", "the connection is refused"),))
    lines = survey_lines(survey, judge(survey))
    assert "error: node7: the connection is refused" in lines
    assert lines[-1] == "1 error, 0 warnings"


@pytest.mark.parametrize(
    ("rate", "text"), [(12.5e6, "100 Mbit/s"), (1.25e8, "1 Gbit/s"), (1.2e4, "0.096 Mbit/s")]
)
def test_rates_are_in_bits(rate: float, text: str) -> None:
    assert format_rate(rate) == text
