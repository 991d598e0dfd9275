"""Every call of an exchange goes to the inner one, and observers are notified before and after it."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest
import torch

from poseidon.exchange.base import Exchange
from poseidon.exchange.control import AloneDelivery, JobControl
from poseidon.exchange.observe.observed import Call, ObservedExchange, Observer
from ps_server import PeerLost, SignalKind


class Notes(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def before(self, call: Call, index: int) -> None:
        self.calls.append((call, index))

    def after(self, call: Call, index: int, began_ns: int, ended_ns: int) -> None:
        assert self.calls.pop() == (call, index)
        self.calls.append((call, index, ended_ns - began_ns))


class Quiet(Observer):
    """Overrides nothing."""


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.fixture
def inner() -> Exchange:
    inner: Exchange = create_autospec(Exchange, instance=True)
    inner.by_factors, inner.control = {2}, JobControl(AloneDelivery(), root=True)  # type: ignore[misc]
    return inner


def test_every_call_of_the_contract_is_passed_on_and_seen(inner: Exchange) -> None:
    times, notes = iter(range(100)), Notes()
    exchange = ObservedExchange(inner, [Quiet(), notes], now_ns=lambda: next(times))
    assert public(Exchange) - public(ObservedExchange) == {"by_factors", "control", "state"}
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
    names = [
        "open",
        "open",
        "start",
        "begin",
        "begin_factors",
        "release",
        "wait",
        "finish",
        "settle",
        "close",
    ]
    calls = [call for call in inner.method_calls if "state" not in call[0]]  # type: ignore[attr-defined]
    assert [call[0] for call in calls] == names
    assert calls[1].args == (None, 7)
    assert exchange.by_factors == {2}
    assert inner.control.requests == exchange.control.requests
    kinds = [
        "open",
        "open",
        "start",
        "begin",
        "begin",
        "wait",
        "finish",
        "settle",
        "histories",
        "gather",
        "close",
    ]
    assert [(call.value, index) for call, index, _ in notes.calls] == list(
        zip(kinds, [-1, -1, 3, 1, 2, 4, -1, -1, -1, -1, -1], strict=True)
    )
    assert {length for _, _, length in notes.calls} == {1}


def test_a_call_that_fails_is_seen_to_its_end(inner: Exchange) -> None:
    notes = Notes()
    inner.wait.side_effect = PeerLost("gone")  # type: ignore[attr-defined]
    with pytest.raises(PeerLost):
        ObservedExchange(inner, [notes]).wait(3)
    assert [call[:2] for call in notes.calls] == [(Call.WAIT, 3)]
