"""The cost of a page: turns of one job, each compared with those around it."""

from __future__ import annotations

import pytest

from benchmarks.page_overhead import is_on, ratios


def test_turns_follow_the_clock() -> None:
    assert [is_on(moment_s, 2.0) for moment_s in (0.0, 1.9, 2.0, 3.9, 4.1)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_a_turn_is_compared_with_both_around_it() -> None:
    moments, now_s = [], 0.0
    while now_s < 20.0:
        moments.append(now_s)
        drift = 1.0 + now_s / 100  # the machine becomes slower
        now_s += 0.01 * drift * (1.1 if is_on(now_s, 2.0) else 1.0)
    found = ratios(moments, 2.0)
    assert len(found) == 4
    assert found == pytest.approx([1.1] * 4, rel=0.005)


def test_turns_at_the_ends_do_not_count() -> None:
    assert ratios([2.0 + 0.01 * step for step in range(190)], 2.0) == []
