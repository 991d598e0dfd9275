"""A loop that moves, one that waits for others, and one that hangs are told apart."""

from __future__ import annotations

import pytest
import torch

from poseidon.exchange.base import Exchange
from poseidon.exchange.observe.forwarding import ForwardingExchange
from poseidon.exchange.observe.pulse import Pulse, PulsingExchange, Reading


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_before_its_start_nothing_hangs(clock: Clock) -> None:
    pulse = Pulse(now=clock)
    pulse.beat()
    clock.now += 1000
    assert pulse.read() == Reading(still_s=0.0, waiting=False, waited_s=0.0)


def test_a_loop_that_does_not_move_is_still(clock: Clock) -> None:
    pulse = Pulse(now=clock)
    pulse.start()
    clock.now += 7
    assert pulse.read().still_s == 7
    pulse.beat()
    assert pulse.read().still_s == 0
    clock.now += 5
    pulse.stop()
    assert pulse.read().still_s == 0


def test_who_waits_for_others_does_not_hang(clock: Clock) -> None:
    pulse = Pulse(now=clock)
    pulse.start()
    clock.now += 1
    with pulse.waiting():
        clock.now += 500
        with pulse.waiting():
            clock.now += 100
        assert pulse.read() == Reading(still_s=0.0, waiting=True, waited_s=600.0)
    clock.now += 3
    assert pulse.read() == Reading(still_s=3.0, waiting=False, waited_s=600.0)


class Slow(ForwardingExchange):
    """An exchange in which every call takes a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_"):
            return object.__getattribute__(self, name)

        def call(*arguments: object) -> None:
            self._clock.now += 1

        return call


def test_every_call_of_an_exchange_is_a_wait_or_a_move(clock: Clock) -> None:
    pulse = Pulse(now=clock)
    slow: Exchange = Slow(clock)
    exchange = PulsingExchange(slow, pulse)
    pulse.start()
    waits = [
        lambda: exchange.open(None),
        lambda: exchange.reopen(None, 5),
        lambda: exchange.start(0, 0.1),
        lambda: exchange.wait(0),
        exchange.finish,
        exchange.settle,
        exchange.histories,
        lambda: exchange.gathered(lambda: None),
        exchange.close,
    ]
    for number, wait in enumerate(waits, start=1):
        wait()
        assert pulse.read() == Reading(still_s=0.0, waiting=False, waited_s=float(number))
    clock.now += 10
    exchange.begin(0, torch.zeros(1))
    assert pulse.read().still_s == 1
    clock.now += 10
    exchange.begin_factors(0, torch.zeros(1), torch.zeros(1))
    assert pulse.read().still_s == 1
