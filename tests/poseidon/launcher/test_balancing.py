"""What a running job does with the times that its workers report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from poseidon.cluster.dial.local import LocalDialer
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import parse_machinefile
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import RegroupRequested
from poseidon.launcher.balancer import Times
from poseidon.launcher.balancing import Balancing, times_of
from poseidon.launcher.request import Balance, JobRequest
from poseidon.launcher.site import Site
from tests.support.fake_job import FakeJob


class TwelveWorkers(FakeJob):
    """A job with twelve virtual workers."""

    fixed_because = ""

    def usual_virtual_workers(self, plan: object) -> int:
        return 12


class Case:
    """A job on two hosts; the clock is moved by hand."""

    def __init__(self, balance: Balance) -> None:
        request = JobRequest(output=Path("out"), balance=balance)
        site = Site(parse_machinefile("0 a 0\n1 b 0\n2 c 0", source="hosts"), LocalDialer())
        self.job = TwelveWorkers(request, site, title="", stem="j", devices=("cpu",))
        *two, self.third = site.hosts
        self.job.site.go_on(two)
        self.job.renew_plan()
        self.requests = SignalRequests(request.supervision_settings())
        self.said: list[str] = []
        self.now_s = 100.0
        self.balancing = Balancing(
            self.job, self.requests, self.said.append, now=lambda: self.now_s
        )

    def hear(self, index: int, role: Role = Role.WORKER, **event: object) -> None:
        name = ProcessName(role=role, index=index, host="a", client=index)
        self.balancing.on_event(name, event)

    def train(self, *each_s: float) -> None:
        """Let the workers report 5 iterations, by the time that one virtual worker takes."""
        own = [s * len(self.job.virtual_workers.of(rank)) for rank, s in enumerate(each_s)]
        for count in (1, 6):
            for rank, seconds in enumerate(own):
                times = {"own_s": count * seconds, "whole_s": count * max(own)}
                self.hear(rank, event="timed", iterations=count, **times)
            self.now_s += max(own)


def test_a_job_is_placed_anew_by_the_measured_speeds_of_its_workers() -> None:
    case = Case(Balance(measured=True))
    case.train(1.0, 2.0)
    assert case.requests.take() == [RegroupRequested()]
    assert case.said == [
        "the workers will compute for 8, 4 virtual workers, instead of 6, 6: each takes 1, 2 s on "
        "the workers, and an iteration then takes about 8 s instead of 12 s"
    ]
    case.train(1.0, 2.0)  # until all have paused
    assert case.requests.take() == []
    assert case.job.virtual_workers.bounds == (0, 6, 12)
    case.balancing.on_ended()
    case.job.renew_plan()
    assert case.job.virtual_workers.bounds == (0, 8, 12)
    case.now_s += 50.0
    case.train(2.0, 2.0)
    assert case.requests.take() == []  # 4 s of 16 in each of 5 iterations are less than the pause
    assert len(case.said) == 1


def test_a_loss_keeps_the_measured_speeds() -> None:
    """A host that joins counts as the mean of the others."""
    case = Case(Balance(measured=True))
    case.train(1.0, 1.05)
    assert case.requests.take() == []
    case.job.take_speeds((1.0, 3.0))
    case.balancing.on_ended()
    first, second = case.job.site.hosts
    case.job.site.go_on([second, first])
    case.job.renew_plan()
    assert case.job.virtual_workers.bounds == (0, 9, 12)
    case.job.site.go_on([case.third, first])
    case.job.renew_plan()
    assert case.job.virtual_workers.bounds == (0, 8, 12)


def test_speeds_that_were_given_stay() -> None:
    case = Case(Balance(speeds=(1.0, 0.5, 1.0)))
    case.train(1.0, 1.0)
    assert case.requests.take() == []
    case.job.renew_plan()
    assert case.job.virtual_workers.bounds == (0, 8, 12)


@pytest.mark.parametrize(
    ("event", "times"),
    [
        (
            {"event": "timed", "iterations": 2, "own_s": 1, "whole_s": 1.5},
            Times(iterations=2, own_s=1.0, whole_s=1.5),
        ),
        ({"event": "alive", "iterations": 2, "own_s": 1, "whole_s": 1.5}, None),
        ({"event": "timed", "iterations": 2, "own_s": 1}, None),
        ({"event": "timed", "iterations": "2", "own_s": 1.0, "whole_s": 1.5}, None),
    ],
)
def test_reports(event: Mapping[str, object], times: Times | None) -> None:
    assert times_of(event) == times


def test_what_others_report_is_no_measurement() -> None:
    case = Case(Balance(measured=True))
    for count in (1, 10):
        times = {"iterations": count, "own_s": 1.0 * count, "whole_s": 1.0 * count}
        case.hear(0, Role.SHARD, event="timed", **times)
        case.hear(1, event="timed", **times)
    assert case.said == []
