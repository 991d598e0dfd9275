"""The examination of hosts: the rounds of pairs, and this machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.dial.dialer import dial_here
from poseidon.cluster.doctor.findings import Severity, judge
from poseidon.cluster.doctor.survey import ASKING, MEASURING, LinkReport, Subject, examine, rounds
from poseidon.cluster.host_probe import Check, HostFacts
from poseidon.cluster.machinefile import Host
from tests.support.free_ports import free_port


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_and_no_host_is_in_two_pairs_at_a_time(count: int) -> None:
    every = list(rounds(count))
    pairs = [pair for pairs in every for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for round_ in every:
        players = [player for pair in round_ for player in pair]
        assert len(players) == len(set(players))
    assert len(every) <= max(0, count)


def _description(agent: RemoteAgent, folder: str) -> Mapping[str, Any]:
    check = Check(describe=True, folder=folder, names=("localhost",))
    return agent.ask_for(HostFacts, Service.CHECK, check).description


def test_this_machine_is_examined_alone(tmp_path: Path) -> None:
    agent = dial_here()
    facts = _description(agent, str(tmp_path / "not" / "there"))
    survey = examine([Subject(agent=agent, facts=facts)], seconds=0.1)
    agent.close()
    (host,) = survey.hosts
    assert (host.label, host.address) == ("this machine", "")
    assert survey.links == ()
    assert host.facts["folder"] == str(tmp_path)
    assert host.facts["packages"]["torch"]
    assert host.facts["cores"] >= 1
    assert host.facts["names"]["localhost"]
    assert abs(host.clock_offset_s) <= host.clock_error_s + 1.0
    assert not [finding for finding in judge(survey) if finding.severity is Severity.ERROR]


def test_links_between_agents_are_measured_in_both_directions() -> None:
    agents = [dial_here("ml@node0"), dial_here("ml@node1")]
    port = free_port()
    clients = [Host(id=0, address="127.0.0.1", port=port), Host(id=1, address="127.0.0.1", port=0)]
    told: list[tuple[str, int, int]] = []
    survey = examine(
        [
            Subject(agent=agent, clients=(client,), address="127.0.0.1")
            for agent, client in zip(agents, clients, strict=True)
        ],
        seconds=0.1,
        report=lambda *progress: told.append(progress),
    )
    for agent in agents:
        agent.close()
    assert [(host.label, host.clients) for host in survey.hosts] == [
        ("ml@node0", (0,)),
        ("ml@node1", (1,)),
    ]
    assert [(link.source, link.target) for link in survey.links] == [(0, 1), (1, 0)]
    assert all(_is_good(link) for link in survey.links)
    assert survey.links[1].ports[port] == "open"
    assert survey.problems == ()
    assert told == [(ASKING, 0, 2), (ASKING, 2, 2), (MEASURING, 0, 1), (MEASURING, 1, 1)]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)  # no port stays open


def _is_good(link: LinkReport) -> bool:
    assert link.rtt_s is not None and link.bytes_per_s is not None and link.mtu is not None
    return (
        not link.problem
        and set(link.ports.values()) == {"open"}
        and 0 < link.rtt_s < 1
        and link.bytes_per_s > 0
        and bool(link.largest_packet)
    )


def test_a_host_that_does_not_answer_is_a_problem_and_no_error() -> None:
    agents = [dial_here("ml@node0"), dial_here("ml@node1")]
    agents[1].close()
    survey = examine([Subject(agent=agent) for agent in agents], seconds=0.1)
    agents[0].close()
    assert [host.label for host in survey.hosts] == ["ml@node0"]
    ((label, why),) = survey.problems
    assert (label, why.startswith("ml@node1")) == ("ml@node1", False)


def test_an_address_of_another_host_is_a_problem() -> None:
    agent = dial_here("ml@node0")
    survey = examine([Subject(agent=agent, address="192.0.2.1")], seconds=0.1)
    agent.close()
    assert survey.hosts == ()
    assert survey.problems == (("ml@node0", os.strerror(errno.EADDRNOTAVAIL)),)
