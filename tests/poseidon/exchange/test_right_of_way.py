"""Who moves has the right of way, and who does not move loses it."""

from __future__ import annotations

from poseidon.exchange.right_of_way import STALL_S, RightOfWay


def test_the_way_is_taken_until_nothing_waits_for_any_peer() -> None:
    way = RightOfWay(2)
    assert not way.is_taken(0.0)
    way.note(0, 2, 0.0)
    way.note(1, 1, 0.0)
    assert way.is_taken(0.5)
    way.note(0, 0, 0.5)
    assert way.is_taken(0.5)
    way.note(1, 0, 0.6)
    assert not way.is_taken(0.6)


def test_a_peer_that_takes_nothing_loses_the_way_until_it_takes_something() -> None:
    way = RightOfWay(1)
    way.note(0, 3, 0.0)
    way.note(0, 4, STALL_S / 2)  # more to send is no movement
    assert not way.is_taken(STALL_S)
    way.note(0, 3, STALL_S)
    assert way.is_taken(STALL_S)
    assert not way.is_taken(2 * STALL_S)


def test_what_comes_after_a_pause_has_all_its_time() -> None:
    way = RightOfWay(1)
    way.note(0, 1, 0.0)
    way.note(0, 0, 0.1)
    way.note(0, 1, 10 * STALL_S)
    assert way.is_taken(10.5 * STALL_S)
