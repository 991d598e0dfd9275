"""The examination of hosts: the rounds of pairs, and this machine."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from poseidon.cluster import host_probe
from poseidon.cluster.doctor.findings import Severity, judge
from poseidon.cluster.doctor.session import this_machine
from poseidon.cluster.doctor.survey import examine, rounds
from poseidon.cluster.host_checks import request


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_and_no_host_is_in_two_pairs_at_a_time(count: int) -> None:
    every = list(rounds(count))
    pairs = [pair for pairs in every for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for round_ in every:
        players = [player for pair in round_ for player in pair]
        assert len(players) == len(set(players))
    assert len(every) <= max(0, count)


def test_this_machine_is_examined_alone(tmp_path: Path) -> None:
    folder = str(tmp_path / "not" / "there")
    facts = host_probe.answer(request((), {"folder": folder, "names": ["localhost"]}))[
        "description"
    ]
    with this_machine(facts) as subjects:
        survey = examine(subjects, seconds=0.1)
    (host,) = survey.hosts
    assert survey.links == ()
    assert host.facts["folder"] == str(tmp_path)
    assert host.facts["packages"]["torch"]
    assert host.facts["cores"] >= 1
    assert host.facts["names"]["localhost"]
    assert abs(host.clock_offset_s) <= host.clock_error_s + 1.0
    assert not [finding for finding in judge(survey) if finding.severity is Severity.ERROR]
