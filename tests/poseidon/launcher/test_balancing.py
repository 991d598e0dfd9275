"""What a running job does with the times that its workers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from poseidon.cluster.dial.dialer import LocalDialer
from poseidon.cluster.job_plan import ProcessName, Role
from poseidon.cluster.machinefile import parse_machinefile
from poseidon.cluster.supervision.signals import SignalRequests
from poseidon.cluster.supervision.state import RegroupRequested
from poseidon.launcher.balancing import (
    LEAST,
    LEAST_S,
    REMEMBERED_S,
    Balancer,
    Balancing,
    Measured,
    Seen,
    Times,
    times_of,
)
from poseidon.launcher.request import Balance, JobRequest
from poseidon.launcher.site import Site
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.fake_job import FakeJob


class Workers:
    """Workers that train, and report what they have measured.

    Args:
        placed: the virtual workers.
        speeds: of each worker, in virtual workers a second.
        pause_s: of a new placement.
        waits_s: for others in each iteration, beyond those for the slowest.
    """

    def __init__(
        self,
        placed: VirtualWorkers,
        speeds: Sequence[float],
        *,
        pause_s: float = 0.0,
        waits_s: float = 0.0,
    ) -> None:
        self.balancer, self._pause_s = Balancer(placed, [Seen() for _ in speeds]), pause_s
        self.placed, self.speeds, self._waits_s = placed, list(speeds), waits_s
        self._totals = [Times(iterations=0, own_s=0.0, whole_s=0.0) for _ in speeds]

    def own_s(self) -> list[float]:
        """Return the time of an iteration of each worker."""
        return [len(self.placed.of(p)) / speed for p, speed in enumerate(self.speeds)]

    def train(self, iterations: int) -> list[Measured | None]:
        """Train; return what followed from the reports of each iteration."""
        found = []
        for _ in range(iterations):
            own_s, last = self.own_s(), None
            for rank, (total, own) in enumerate(zip(self._totals, own_s, strict=True)):
                self._totals[rank] = Times(
                    iterations=total.iterations + 1,
                    own_s=total.own_s + own,
                    whole_s=total.whole_s + max(own_s) + self._waits_s,
                )
                last = self.balancer.take(rank, self._totals[rank], self._pause_s) or last
            found.append(last)
        return found


@pytest.mark.parametrize(
    ("bounds", "speeds", "waits_s", "expected"),
    [
        ((0, 6, 12), (1, 0.5), 0, (0, 8, 12)),
        ((0, 8, 12), (0.5, 1), 0, (0, 4, 12)),
        ((0, 6, 12), (1, 1), 0, None),
        ((0, 6, 12), (1, 0.85), 0, None),  # 7 and 5: no more than 1 % faster
        ((0, 6, 12), (1, 0.5), 27, (0, 8, 12)),  # 4 of 39 s
        ((0, 6, 12), (1, 0.5), 29, None),  # 4 of 41 s
        ((0, 2, 3), (1, 0.1), 0, None),  # each needs one
        ((0, 12), (0.5,), 0, None),
        ((0, 4, 8, 12), (1, 1, 0.25), 0, (0, 6, 11, 12)),
        ((0, 6, 12), (1e9, 1), 0, (0, 11, 12)),
    ],
)
def test_a_new_placement_saves_a_part_of_an_iteration(
    bounds: tuple[int, ...], speeds: Sequence[float], waits_s: float, expected: object
) -> None:
    workers = Workers(VirtualWorkers(bounds), speeds, waits_s=waits_s)
    *before, measured = workers.train(1 + LEAST)  # the first report counts from its end on
    assert before == [None] * LEAST
    assert measured is not None
    assert measured.speeds == pytest.approx(speeds)
    assert (None if measured.placed is None else measured.placed.bounds) == expected


def test_the_reason_has_the_times() -> None:
    measured = Workers(VirtualWorkers((0, 6, 12)), (10, 5)).train(1 + LEAST)[-1]
    assert measured is not None
    assert measured.iteration_s == pytest.approx(0.8)
    assert measured.reason == (
        "each takes 0.1, 0.2 s on the workers, and an iteration then takes about 0.8 s instead of "
        "1.2 s"
    )


def test_a_worker_that_only_waits_gets_most() -> None:
    balancer = Balancer(VirtualWorkers((0, 2, 4)), [Seen(), Seen()])
    for count in (0, LEAST):
        for rank, own_s in enumerate((0.0, 1.0)):
            times = Times(iterations=count, own_s=count * own_s, whole_s=float(count))
            measured = balancer.take(rank, times, 0.0)
    assert measured is not None
    assert measured.placed == VirtualWorkers((0, 3, 4))


def test_fast_iterations_are_measured_for_a_while() -> None:
    found = Workers(VirtualWorkers((0, 6, 12)), (100, 50)).train(100)  # 0.12 s
    first = next(number for number, measured in enumerate(found) if measured is not None)
    assert first == pytest.approx(LEAST_S / 0.12, abs=1)


@pytest.mark.parametrize(("pause_s", "iterations"), [(0.0, 4), (16.0, 4), (17.0, 5), (100.0, 25)])
def test_a_pause_has_to_pay(pause_s: float, iterations: int) -> None:
    """4 s are saved in an iteration of 12 s."""
    workers = Workers(VirtualWorkers((0, 6, 12)), (1, 0.5), pause_s=pause_s)
    found = workers.train(1 + iterations)
    placed = [measured is not None and measured.placed is not None for measured in found]
    assert placed == [False] * iterations + [True]


def test_what_was_lost_before_the_workers_were_equally_fast_does_not_count() -> None:
    workers = Workers(VirtualWorkers((0, 6, 12)), (1, 0.5), pause_s=50.0)
    assert all(one is None or one.placed is None for one in workers.train(11))  # 40 s
    workers.speeds = [1, 1]
    assert workers.train(40)[-1] == Measured(speeds=pytest.approx((1, 1)))
    workers.speeds = [1, 0.5]
    found = workers.train(20)
    first = next(n for n, one in enumerate(found) if one is not None and one.placed is not None)
    assert first >= 12


def run(
    count: int, speeds: Sequence[float], iterations: int, noise: float = 0.0, pause_s: float = 1.0
) -> tuple[float, int]:
    """Return the speed at the end as a part of the summed speed, and the placements; alternately
    each worker is faster and slower by the noise.
    """
    placed, placements = VirtualWorkers.spread(count, [1.0] * len(speeds)), 0
    workers = Workers(placed, speeds, pause_s=pause_s)
    for iteration in range(iterations):
        workers.speeds = [s * (1 + noise * (-1) ** (iteration + p)) for p, s in enumerate(speeds)]
        (measured,) = workers.train(1)
        if measured is not None and measured.placed is not None:
            placements += 1
            workers = Workers(measured.placed, speeds, pause_s=pause_s)
    workers.speeds = list(speeds)
    return count / max(workers.own_s()) / sum(speeds), placements


@pytest.mark.parametrize(
    ("count", "speeds", "part"),
    [
        (28, (1.0, 0.5, 0.25), 0.99),
        (24, (1.0, 0.5, 0.25), 0.95),
        (24, (0.25, 1.0, 0.5), 0.95),
        (12, (1.0, 0.5), 0.99),
        (12, (10.0, 5.0), 0.99),  # of 1.2 s
        (12, (1.0, 1.0, 1.0), 0.99),
        (12, (1.0, 0.5, 0.25), 0.85),  # 7, 3 and 2: so few cannot be divided better
    ],
)
def test_unequal_workers_reach_their_summed_speed_within_30_iterations(
    count: int, speeds: Sequence[float], part: float
) -> None:
    assert run(count, speeds, 30)[0] >= part


def test_noise_does_not_place_virtual_workers_again_and_again() -> None:
    assert run(16, (1.0, 1.0, 1.0, 1.0), 1000, noise=0.04)[1] == 0
    assert run(24, (1.0, 0.5, 0.25), 1000, noise=0.04)[1] <= 2


def test_pauses_take_no_longer_than_what_they_save() -> None:
    """The workers exchange their speeds each time that a placement fits them."""
    workers, lost_s, pauses = Workers(VirtualWorkers((0, 6, 12)), (1, 0.5), pause_s=30.0), 0.0, 0
    for _ in range(400):
        lost_s += max(workers.own_s()) - 8
        (measured,) = workers.train(1)
        if measured is not None and measured.placed is not None:
            pauses += 1
            workers = Workers(measured.placed, workers.speeds[::-1], pause_s=30.0)
    assert pauses > 5
    assert 30.0 * pauses <= lost_s


def test_what_one_took_with_more_virtual_workers_counts_for_a_while() -> None:
    seen = Seen()
    assert seen.take(6, 0.029, 5) == 0.029
    assert seen.take(3, 0.016, 5) == 0.029  # a quota that 3 do not use up
    assert seen.take(9, 0.012, 5) == 0.012
    assert seen.take(3, 0.016, REMEMBERED_S - 11) == 0.029
    assert seen.take(3, 0.016, 1) == 0.016


def test_a_quota_of_processor_moves_virtual_workers_once() -> None:
    seen = [Seen(), Seen()]

    def placed_from(bounds: tuple[int, ...], *own_s: float) -> tuple[int, ...] | None:
        balancer, whole_s, found = Balancer(VirtualWorkers(bounds), seen), max(own_s), None
        for number in (1, 101):
            for rank, own in enumerate(own_s):
                times = Times(iterations=number, own_s=number * own, whole_s=number * whole_s)
                found = balancer.take(rank, times, 0.5) or found
        assert found is not None
        return found.placed.bounds if found.placed else None

    assert placed_from((0, 6, 12), 6 * 0.0113, 6 * 0.0286) == (0, 9, 12)
    assert placed_from((0, 9, 12), 9 * 0.0117, 3 * 0.0156) is None


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
