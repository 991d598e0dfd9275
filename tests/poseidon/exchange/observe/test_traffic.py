from __future__ import annotations

import pytest

from poseidon.exchange.observe.traffic import Flights


class Hand:
    """A clock that is moved by hand."""

    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_flights_of_a_kind_arrive_in_order_and_may_overlap() -> None:
    clock = Hand()
    flights = Flights(2, clock)
    flights.depart(0)
    clock.s = 1
    flights.depart(0)
    flights.depart(1)
    clock.s = 3
    flights.arrive(0)
    assert flights.total_s(0) == pytest.approx(3)
    clock.s = 6
    flights.arrive(0)
    assert flights.total_s(0) == pytest.approx(8)
    assert flights.total_s(1) == 0


def test_what_never_departed_does_not_arrive() -> None:
    flights = Flights(1, Hand())
    flights.arrive(0)
    assert flights.total_s(0) == 0
