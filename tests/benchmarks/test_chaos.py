"""What is drawn from a seed, and when a disturbed job counts as well ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chaos_runs.faults import FAR, LOCAL, Fault, Kind, draw
from benchmarks.chaos_runs.outcome import Ended, read_lines, table, to_line

FINISHED = Ended(
    seed=3,
    fault=Fault(kind=Kind.SHARD, client=1, after=0.5, delay_s=0.1),
    hit=1,
    at_s=12.3,
    took_s=20.0,
    status=0,
    last="job x finished at iteration 700 after 2 restarts, at least 37 iterations repeated",
    traceback=False,
    same_bits=True,
    left=0,
)


def test_a_seed_gives_the_same_fault_and_seeds_give_all() -> None:
    assert draw(5, FAR, 3) == draw(5, FAR, 3)
    for kinds in (LOCAL, FAR):
        drawn = [draw(seed, kinds, 3) for seed in range(30)]
        assert {fault.kind for fault in drawn} == set(kinds)
        assert {fault.client for fault in drawn} == {0, 1, 2}
        assert all(0 <= fault.after < 1 for fault in drawn)


@pytest.mark.parametrize(
    ("run", "good"),
    [
        (FINISHED, True),
        (replace(FINISHED, same_bits=False), False),
        (replace(FINISHED, same_bits=None), False),
        (replace(FINISHED, left=1), False),
        (replace(FINISHED, status=1, same_bits=None, last="no route to node1"), True),
        (replace(FINISHED, status=1, same_bits=None, last=""), False),
        (replace(FINISHED, status=1, same_bits=None, traceback=True), False),
        (replace(FINISHED, status=-9, same_bits=None, last=""), True),
    ],
)
def test_verdicts(run: Ended, good: bool) -> None:
    assert run.good is good


def test_the_table_says_what_happened() -> None:
    (row,) = table([FINISHED])[2:]
    assert row == (
        "| 3 | kill -9 a shard | 1 | 12.3 s | 1 | finished, 2 restarts, 37 iterations repeated | "
        "same bits | 0 |"
    )


def test_results_come_back_and_the_latest_of_a_seed_counts() -> None:
    other = replace(FINISHED, seed=1)
    text = to_line(FINISHED) + to_line(other) + to_line(replace(FINISHED, status=1))
    assert read_lines(text) == [other, replace(FINISHED, status=1)]
