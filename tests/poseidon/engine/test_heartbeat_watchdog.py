"""A loop that moves, one that waits for others, and one that hangs are told apart."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest
import torch

from poseidon.engine.heartbeat import Reading, Watchdog
from poseidon.exchange.base import ExchangeSettings
from poseidon.exchange.carrier import Carrier, CarrierState
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import AloneControl
from ps_server import Collection


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_before_its_start_nothing_hangs(clock: Clock) -> None:
    watchdog = Watchdog(now=clock)
    watchdog.progress()
    clock.now += 1000
    assert watchdog.read() == Reading(still_s=0.0, waited_s=0.0)


def test_a_loop_that_does_not_move_is_still(clock: Clock) -> None:
    watchdog = Watchdog(now=clock)
    watchdog.start()
    clock.now += 7
    assert watchdog.read().still_s == 7
    watchdog.progress()
    assert watchdog.read().still_s == 0
    clock.now += 5
    watchdog.stop()
    assert watchdog.read().still_s == 0


def test_who_waits_for_others_does_not_hang(clock: Clock) -> None:
    watchdog = Watchdog(now=clock)
    watchdog.start()
    clock.now += 1
    with watchdog.waiting():
        clock.now += 500
        with watchdog.waiting():
            clock.now += 100
        assert watchdog.read() == Reading(still_s=0.0, waited_s=600.0)
    clock.now += 3
    assert watchdog.read() == Reading(still_s=3.0, waited_s=600.0)


class Slow(Carrier):
    """A carrier of which every call takes a second."""

    indices, by_factors = (0, 1), frozenset({1})

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.state = CarrierState()
        self.state.histories = self.slow  # type: ignore[method-assign, assignment]

    def slow(self, *arguments: object) -> dict[int, object]:
        self._clock.now += 1
        return {}

    open = start = begin = begin_factors = release = wait = finish = settle = close = slow  # type: ignore[assignment]


class SlowControl(AloneControl):
    """Collections that take a second to wait for."""

    def __init__(self, slow: Callable[[], object]) -> None:
        super().__init__()
        self._slow = slow

    def _gather(self, payload: bytes, to: Container[int] | None) -> Collection:
        return Collection(self._slow, self._slow)  # type: ignore[arg-type]


def test_every_call_of_an_exchange_is_a_wait_or_progress(clock: Clock) -> None:
    watchdog = Watchdog(now=clock)
    carrier = Slow(clock)
    exchange = Exchange([carrier], SlowControl(carrier.slow), ExchangeSettings())
    exchange.observe([watchdog])
    watchdog.start()
    waits = [
        lambda: exchange.open(None),
        lambda: exchange.open(None, 5),
        lambda: exchange.start(0, 0.1),
        lambda: exchange.wait(0),
        exchange.finish,
        exchange.settle,
        exchange.state.histories,
        lambda: exchange.control.all_gather(b""),
        exchange.close,
    ]
    for number, wait in enumerate(waits, start=1):
        wait()
        assert watchdog.read() == Reading(still_s=0.0, waited_s=float(number))
    clock.now += 10
    exchange.begin(0, torch.zeros(1))
    assert watchdog.read().still_s == 1
    clock.now += 10
    exchange.begin_factors(1, torch.zeros(1), torch.zeros(1))
    assert watchdog.read().still_s == 1
