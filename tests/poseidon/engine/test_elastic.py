"""When memory snapshots are due."""

from __future__ import annotations

from poseidon.engine.elastic import FIRST, LEAST, MOST, SnapshotInterval


def after_one(iteration_s: float, during_s: float, blocked_s: float) -> SnapshotInterval:
    """Return the interval of a worker after a snapshot at iteration 0 and ten more iterations."""
    interval = SnapshotInterval(0, every=0)
    interval.begun(0, blocked_s)
    interval.decide([(0.0, 0.0)])
    for number in range(10):
        interval.note(during_s if number < 2 else iteration_s, transferring=number < 2)
    return interval


def test_a_fixed_interval_counts_from_the_snapshot_before() -> None:
    interval = SnapshotInterval(7, every=4)
    assert interval.is_due(7)
    interval.begun(7, 0.1)
    assert not interval.is_due(11)  # not before all workers have decided
    interval.decide([(0.0, 0.0)] * 3)
    assert [i for i in range(14) if interval.is_due(i)] == [11, 12, 13]


def test_with_local_steps_one_is_due_where_a_round_ends() -> None:
    interval = SnapshotInterval(7, every=4, steps=5)
    interval.begun(7, 0.1)
    interval.decide([(0.0, 0.0)] * 3)
    assert [i for i in range(26) if interval.is_due(i)] == [15, 20, 25]


def test_the_first_measured_snapshot_comes_soon() -> None:
    interval = SnapshotInterval(7, every=0)
    interval.begun(7, 0.1)
    interval.decide([(0.5, 0.1), (0.0, 0.0)])  # one worker has measured nothing yet
    assert interval.is_due(7 + FIRST)


def test_a_cost_is_the_wait_and_what_slower_iterations_take_longer() -> None:
    cost_s, iteration_s = after_one(iteration_s=0.5, during_s=0.75, blocked_s=0.25).costs()
    assert (cost_s, iteration_s) == (0.25 + 2 * 0.25, 0.5)
    assert after_one(iteration_s=0.5, during_s=0.25, blocked_s=0.75).costs() == (0.25, 0.5)
    assert after_one(iteration_s=0.5, during_s=0.25, blocked_s=0.25).costs() == (0.0, 0.5)


def test_costs_are_a_mean_that_forgets() -> None:
    interval = after_one(iteration_s=0.5, during_s=0.5, blocked_s=1.0)
    interval.begun(10, 3.0)
    interval.note(0.5, transferring=False)
    assert interval.costs() == (0.75 * 1.0 + 0.25 * 3.0, 0.5)


def test_all_workers_decide_together_for_a_fiftieth_of_the_time() -> None:
    interval = after_one(iteration_s=0.5, during_s=0.5, blocked_s=0.0)
    for costs, expected in (
        ([(0.0, 0.5), (0.25, 0.5), (0.125, 0.5)], 13),  # 0.125 s in 12.5 iterations
        ([(0.0, 0.5)] * 3, LEAST),
        ([(1e6, 0.5)] * 3, MOST),
    ):
        interval.begun(100, 0.0)
        interval.decide(costs)
        assert interval.is_due(100 + expected)
