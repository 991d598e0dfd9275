"""Vector clocks and the bound."""

from __future__ import annotations

import pytest

from ps_server.errors import LocalProtocolError, RemoteProtocolError
from ps_server.protocol.clock import VectorClock, needed_clock


def test_the_slowest_moves_only_when_all_have_moved() -> None:
    clock = VectorClock(range(3), start=5)
    assert clock.slowest == 5
    assert not clock.tick(0, 6)
    assert not clock.tick(2, 6)
    assert not clock.tick(0, 7)
    assert clock.tick(1, 6)
    assert clock.slowest == 6


@pytest.mark.parametrize("wrong", [0, 2, -1])
def test_a_clock_that_repeats_or_skips_changes_nothing(wrong: int) -> None:
    clock = VectorClock((3, 5))
    with pytest.raises(RemoteProtocolError, match="expected 1"):
        clock.tick(3, wrong)
    assert not clock.tick(3, 1)


@pytest.mark.parametrize(("clock", "staleness", "needed"), [(0, 0, 0), (5, 0, 5), (5, 2, 3)])
def test_the_bound(clock: int, staleness: int, needed: int) -> None:
    assert needed_clock(clock, staleness) == needed


def test_no_workers_is_an_error() -> None:
    with pytest.raises(LocalProtocolError):
        VectorClock(())
