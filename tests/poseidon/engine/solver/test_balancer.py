"""Which process computes for how many virtual workers, by measured times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poseidon.engine.solver.balancer import FIRST, LEAST, LEAST_S, WARM_UP, Balancer, Times
from ps_server.protocol.virtual_workers import VirtualWorkers

FIRST_DUE = WARM_UP + FIRST


def times_of(placed: VirtualWorkers, speeds: Sequence[float], *, waits_s: float = 0) -> list[Times]:
    """Return the times of processes with these speeds: virtual workers in a second."""
    own = [len(placed.of(p)) / speed for p, speed in enumerate(speeds)]
    return [Times(own_s=one, whole_s=max(own) + waits_s) for one in own]


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
        ((0, 4, 8, 12), (1, 1, 0.25), 0, (0, 6, 11, 12)),
        ((0, 6, 12), (1e9, 1), 0, (0, 11, 12)),
    ],
)
def test_a_move_saves_a_part_of_an_iteration(
    bounds: tuple[int, ...], speeds: Sequence[float], waits_s: float, expected: object
) -> None:
    placed = VirtualWorkers(bounds)
    times = times_of(placed, speeds, waits_s=waits_s)
    move = Balancer(placed, 0).decide(FIRST_DUE + 1, times)
    assert (None if move is None else move.placed.bounds) == expected


def test_the_reason_has_the_times() -> None:
    placed = VirtualWorkers((0, 6, 12))
    move = Balancer(placed, 0).decide(6, times_of(placed, (10, 5)))
    assert move is not None
    assert move.reason == (
        "one takes 0.1, 0.2 s on each worker, and an iteration then about 0.8 s instead of 1.2 s"
    )


def test_a_process_that_only_waits_gets_most() -> None:
    times = [Times(own_s=0.0, whole_s=1.0), Times(own_s=1.0, whole_s=1.0)]
    move = Balancer(VirtualWorkers((0, 2, 4)), 0).decide(6, times)
    assert move is not None
    assert move.placed.bounds == (0, 3, 4)


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize(
    ("slow", "whole_s", "measured", "warm_up"),
    [
        (False, 12.0, LEAST, 0),
        (True, 12.0, LEAST, WARM_UP),
        (False, LEAST_S / 50, 50, 0),
    ],
)
def test_when_times_are_measured(
    start: int, slow: bool, whole_s: float, measured: int, warm_up: int
) -> None:
    """The first iteration does not count, nor the first after a move; nothing counts between the
    end of a measurement and its decision.
    """
    balancer = Balancer(VirtualWorkers((0, 6, 12)), start)
    decided = start + FIRST_DUE + 1
    own = (whole_s / 2 if slow else whole_s, whole_s)
    counted = [i for i in range(start, decided) if balancer.counts(i)]
    assert counted == list(range(start + WARM_UP, start + FIRST_DUE))
    assert [i for i in range(start, decided + 1) if balancer.is_due(i)] == [start + FIRST_DUE]
    move = balancer.decide(decided, [Times(own_s=one, whole_s=whole_s) for one in own])
    assert (move is not None) is slow
    begin = decided + warm_up
    counted = [i for i in range(decided, decided + 200) if balancer.counts(i)]
    assert counted == list(range(begin, begin + measured))
    due = [i for i in range(decided, decided + 200) if balancer.is_due(i)]
    assert due == [begin + measured]


def run(
    count: int, speeds: Sequence[float], iterations: int, noise: float = 0.0
) -> tuple[float, int]:
    """Return the speed at the end as a part of the summed speed, and the moves; alternately each
    process seems faster and slower by the noise.
    """
    placed = VirtualWorkers.spread(count, [1.0] * len(speeds))
    balancer, moves, due = Balancer(placed, 0), 0, False
    for iteration in range(1, iterations + 1):
        if due:
            seen = [s * (1 + noise * (-1) ** (iteration + p)) for p, s in enumerate(speeds)]
            move = balancer.decide(iteration, times_of(placed, seen))
            moves += move is not None
            placed = placed if move is None else move.placed
        due = balancer.is_due(iteration)
    slowest_s = max(one.own_s for one in times_of(placed, speeds))
    return count / slowest_s / sum(speeds), moves


@pytest.mark.parametrize(
    ("count", "speeds", "part"),
    [
        (28, (1.0, 0.5, 0.25), 0.99),
        (24, (1.0, 0.5, 0.25), 0.95),
        (24, (0.25, 1.0, 0.5), 0.95),
        (12, (1.0, 0.5), 0.99),
        (12, (1.0, 1.0, 1.0), 0.99),
        (12, (1.0, 0.5, 0.25), 0.85),  # 7, 3 and 2: so few cannot be divided better
    ],
)
def test_unequal_processes_reach_their_summed_speed_within_30_iterations(
    count: int, speeds: Sequence[float], part: float
) -> None:
    assert run(count, speeds, 30)[0] >= part


def test_noise_does_not_move_virtual_workers_again_and_again() -> None:
    assert run(16, (1.0, 1.0, 1.0, 1.0), 1000, noise=0.04)[1] == 0
    assert run(24, (1.0, 0.5, 0.25), 1000, noise=0.04)[1] <= 2
