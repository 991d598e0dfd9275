"""An exchange calls the carrier of each tensor, merges their states, and notifies observers
before and after each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon.exchange.base import Array, ExchangeSettings, History
from poseidon.exchange.carrier import Carrier, CarrierState, Step
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.job_control import AloneControl, JobControl
from poseidon.exchange.observer import ObservedCall, Observer, Traffic
from ps_server import PeerLost, SignalKind


class Notes(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def before(self, call: ObservedCall, index: int) -> None:
        self.calls.append((call, index))

    def after(self, call: ObservedCall, index: int, began_ns: int, ended_ns: int) -> None:
        assert self.calls.pop() == (call, index)
        self.calls.append((call, index, ended_ns - began_ns))


class Quiet(Observer):
    """Overrides nothing."""


class NotedState(CarrierState):
    def __init__(self, indices: Sequence[int], *, private: bool) -> None:
        self.private = private
        self._indices = indices
        self.given: Mapping[str, Array] = {}

    def histories(self) -> Mapping[int, History]:
        return {index: [np.full(1, index, np.float32)] for index in self._indices}

    def replicated(self) -> Mapping[str, Tensor]:
        return {f"r{index}": torch.tensor(index) for index in self._indices}

    def held_back(self) -> Mapping[str, Array]:
        return {f"h{index}": np.full(1, index, np.float32) for index in self._indices}

    def hold_back(self, held_back: Mapping[str, Array]) -> None:
        self.given = held_back


class Noted(Carrier):
    """Writes down the calls."""

    def __init__(
        self,
        indices: Sequence[int],
        log: list[tuple[object, ...]],
        *,
        by_factors: Sequence[int] = (),
        held: float = 0.0,
        private: bool = False,
    ) -> None:
        self.indices = indices
        self.by_factors = frozenset(by_factors)
        self.state = NotedState(indices, private=private)
        self._held = held
        self._log = log

    def open(self, histories: Sequence[History] | None, clock: int | None) -> None:
        self._log.append((self.indices, "open", histories, clock))

    def start(self, step: Step) -> None:
        self._log.append((self.indices, "start", step))

    def begin(self, index: int, gradient: Tensor) -> None:
        self._log.append((self.indices, "begin", index, gradient.tolist()))

    def begin_factors(self, index: int, u_KN: Tensor, v_KM: Tensor) -> None:
        self._log.append((self.indices, "begin_factors", index, u_KN.tolist(), v_KM.tolist()))

    def release(self, index: int) -> None:
        self._log.append((self.indices, "release", index))

    def wait(self, index: int) -> None:
        self._log.append((self.indices, "wait", index))

    def held_squares(self) -> list[float]:
        return [self._held]

    def finish(self, limit: float) -> None:
        self._log.append((self.indices, "finish", limit))

    def settle(self, clock: int) -> None:
        self._log.append((self.indices, "settle", clock))

    def traffic(self) -> Mapping[int, Traffic]:
        return {index: Traffic(bytes_out=index, bytes_in=0, on_way_s=0.0) for index in self.indices}

    def close(self) -> None:
        self._log.append((self.indices, "close"))


def control() -> JobControl:
    return AloneControl()


def test_each_call_goes_to_the_carrier_of_the_tensor_or_to_all() -> None:
    log: list[tuple[object, ...]] = []
    even, odd = Noted((0, 2), log), Noted((1, 3), log, by_factors=[3])
    exchange = Exchange([even, odd], control(), ExchangeSettings(start_clock=5))
    assert exchange.by_factors == {3}
    exchange.open(None)
    exchange.settle()
    exchange.start(5, 0.5)
    exchange.wait(2)
    exchange.begin(1, torch.ones(1))
    exchange.begin_factors(3, torch.ones(1), torch.zeros(1))
    exchange.release(3)
    exchange.finish()
    exchange.settle()
    exchange.open([[]] * 4, 9)
    exchange.settle()
    exchange.close()
    everyone = ((0, 2), (1, 3))
    assert log == [
        *((one, "open", None, None) for one in everyone),
        *((one, "settle", 5) for one in everyone),
        *((one, "start", (5, (0.5,))) for one in everyone),
        ((0, 2), "wait", 2),
        ((1, 3), "begin", 1, [1.0]),
        ((1, 3), "begin_factors", 3, [1.0], [0.0]),
        ((1, 3), "release", 3),
        *((one, "finish", 1.0) for one in everyone),
        *((one, "settle", 6) for one in everyone),
        *((one, "open", [[]] * 4, 9) for one in everyone),
        *((one, "settle", 9) for one in everyone),
        *((one, "close") for one in everyone),
    ]


@pytest.mark.parametrize(("held", "limit"), [((9.0, 16.0), 0.4), ((0.0, 1.0), 1.0)])
def test_the_limit_is_for_the_norm_over_all_carriers(
    held: tuple[float, float], limit: float
) -> None:
    log: list[tuple[object, ...]] = []
    carriers = [Noted((index,), log, held=squares) for index, squares in enumerate(held)]
    Exchange(carriers, control(), ExchangeSettings(clip=2.0)).finish()
    assert log == [((0,), "finish", limit), ((1,), "finish", limit)]


def test_states_and_traffic_are_merged_by_tensor() -> None:
    carriers = [Noted((0, 2), []), Noted((1,), [], private=True)]
    exchange = Exchange(carriers, control(), ExchangeSettings())
    assert exchange.state.private
    assert [float(history[0][0]) for history in exchange.state.histories().values()] == [0, 1, 2]
    assert sorted(exchange.state.replicated()) == ["r0", "r1", "r2"]
    assert sorted(exchange.state.held_back()) == ["h0", "h1", "h2"]
    given = {"h1": np.ones(1, np.float32)}
    exchange.state.hold_back(given)
    assert all(carrier.state.given is given for carrier in carriers)
    assert {index: traffic.bytes_out for index, traffic in exchange.traffic().items()} == {
        0: 0,
        1: 1,
        2: 2,
    }


def test_every_call_is_seen() -> None:
    times, notes = iter(range(100)), Notes()
    carrier = Noted((0, 1, 2, 3, 4), [], by_factors=[2])
    exchange = Exchange([carrier], control(), ExchangeSettings(), now_ns=lambda: next(times))
    exchange.observe([Quiet(), notes])
    gradient = torch.ones(2)
    exchange.open(None)
    exchange.open(None, 7)
    exchange.start(3, 0.5)
    exchange.begin(1, gradient)
    exchange.begin_factors(2, gradient, gradient)
    exchange.release(2)
    exchange.wait(4)
    exchange.finish()
    exchange.settle()
    exchange.state.histories()
    assert exchange.control.all_gather(b"x") == (b"x",)
    assert exchange.control.gather(b"y").poll() == (b"y",)  # does not wait
    exchange.control.request(SignalKind.STOP)
    exchange.close()
    seen = [
        ("open", -1),
        ("open", -1),
        ("start", 3),
        ("begin", 1),
        ("begin", 2),
        ("wait", 4),
        ("finish", -1),
        ("settle", -1),
        ("histories", -1),
        ("gather", -1),
        ("close", -1),
    ]
    assert [(call.value, index) for call, index, _ in notes.calls] == seen
    assert {length for _, _, length in notes.calls} == {1}
    exchange.observe([])
    exchange.wait(0)
    assert len(notes.calls) == len(seen)


def test_a_call_that_fails_is_seen_to_its_end() -> None:
    class Lost(Noted):
        def wait(self, index: int) -> None:
            raise PeerLost("gone")

    notes, exchange = Notes(), Exchange([Lost((3,), [])], control(), ExchangeSettings())
    exchange.observe([notes])
    with pytest.raises(PeerLost):
        exchange.wait(3)
    assert [call[:2] for call in notes.calls] == [(ObservedCall.WAIT, 3)]
