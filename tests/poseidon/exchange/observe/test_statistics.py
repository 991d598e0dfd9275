from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.observe.observer import ObservedCall
from poseidon.exchange.observe.statistics import TransitTimes, WaitTimes
from tests.support.exchange_contract import ITERATIONS, Scenario, train
from tests.support.exchanges import AloneExchange


def test_waits_add_up_by_tensor() -> None:
    waits = WaitTimes(3)
    waits.after(ObservedCall.WAIT, 1, 10_000_000_000, 12_000_000_000)
    waits.after(ObservedCall.WAIT, 1, 20_000_000_000, 21_000_000_000)
    waits.after(ObservedCall.WAIT, 2, 30_000_000_000, 30_500_000_000)
    waits.after(ObservedCall.BEGIN, 0, 0, 1_000_000_000)
    assert waits.waited_s == pytest.approx([0, 3, 0.5])


def test_numbers_stay_and_iterations_are_counted() -> None:
    waits = WaitTimes(8)

    def plain(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        return AloneExchange(tensors, settings)

    def measured(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        exchange = plain(rank, tensors, settings)
        exchange.observe([waits])
        return exchange

    weights = [train(make, 1, Scenario())[0] for make in (plain, measured)]
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))
    assert waits.iterations == ITERATIONS
    assert all(seconds > 0 for seconds in waits.waited_s)


class Hand:
    """A clock that is moved by hand."""

    s = 0.0

    def __call__(self) -> float:
        return self.s


def test_flights_of_a_kind_arrive_in_order_and_may_overlap() -> None:
    clock = Hand()
    flights = TransitTimes(2, clock)
    flights.depart(0)
    clock.s = 1
    flights.depart(0)
    flights.depart(1)
    clock.s = 3
    flights.arrive(0)
    assert flights.total_s[0] == pytest.approx(3)
    clock.s = 6
    flights.arrive(0)
    assert flights.total_s[0] == pytest.approx(8)
    assert flights.total_s[1] == 0


def test_what_never_departed_does_not_arrive() -> None:
    flights = TransitTimes(1, Hand())
    flights.arrive(0)
    assert flights.total_s[0] == 0
