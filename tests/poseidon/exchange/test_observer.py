from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.observer import (
    DeviceSpans,
    ExchangeTrace,
    ObservedCall,
    TracingHooks,
    TransitTimes,
    WaitTimes,
    named_layers,
)
from ps_server.trace import Track
from tests.support.exchange_contract import ITERATIONS, Scenario, train
from tests.support.exchanges import AloneExchange
from tests.support.tracing import Recorded, nested


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


def test_numbers_stay_and_each_tensor_is_seen_in_each_iteration() -> None:
    trace, names = Recorded(), list[str]()

    def plain(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        return AloneExchange(tensors, settings)

    def traced(rank: int, tensors: Sequence[Trained], settings: ExchangeSettings) -> Exchange:
        names.extend(trained.name for trained in tensors)
        exchange = plain(rank, tensors, settings)
        exchange.observe([ExchangeTrace(names, trace)])
        return exchange

    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            train(traced, 1, Scenario())[0], train(plain, 1, Scenario())[0], strict=True
        )
    )
    told = trace.names()
    for name in names:
        assert told.count(("wait", name)) >= ITERATIONS  # `train` also reads between iterations
    assert [name for kind, name in told if kind == "iteration"] == [
        str(i) for i in range(ITERATIONS)
    ]
    assert told.count(("begin", names[0])) == ITERATIONS
    assert nested(trace.spans)
    within = {
        (inner.kind, inner.name) for inner, outer in trace.inside() if outer.kind == "iteration"
    }
    assert {("wait", name) for name in names} <= within


class Net(nn.Module):
    """In-place, branching, a layer that gives its bottom on, two tops."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.halves = Halves()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.halves(self.same(self.act(self.first(x))))
        total: Tensor = (self.left(low) + self.right(high)).square().sum()
        return total


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :3], x[:, 3:]


def train_net(net: Net, steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((2, 4), 0.1 * step)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def test_each_layer_has_its_spans_in_order_and_numbers_stay() -> None:
    trace, net = Recorded(), make()
    hooks = TracingHooks(named_layers(net), trace)
    traced = train_net(net, 3)
    hooks.close()
    forward = [name for kind, name in trace.names() if kind == "forward"]
    assert forward == ["first", "act", "same", "halves", "left", "right"] * 3
    backward = [name for kind, name in trace.names() if kind == "backward"]
    # `same` adds nothing to the graph, so it has no backward.
    assert backward == ["right", "left", "halves", "act", "first"] * 3
    assert nested(trace.spans)
    assert all(torch.equal(a, b) for a, b in zip(traced, train_net(make(), 3), strict=True))


def test_after_close_nothing_is_told() -> None:
    trace, net = Recorded(), make()
    TracingHooks(named_layers(net), trace).close()
    train_net(net, 1)
    assert not trace.spans


def test_spans_hold_what_other_hooks_of_the_layer_do() -> None:
    trace, net = Recorded(), make()
    net.left.register_forward_pre_hook(lambda *_: trace.mark("wait", "left"), prepend=True)
    for name, parameter in net.left.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: trace.mark("begin", name))
    hooks = TracingHooks(named_layers(net), trace)

    def tap(module: nn.Module, arguments: object, top: Tensor) -> None:
        top.register_hook(lambda _: trace.mark("begin", "factors"))

    net.left.register_forward_hook(tap)
    train_net(net, 1)
    hooks.close()
    inside = {(inner.name, outer.kind, outer.name) for inner, outer in trace.inside()}
    assert {
        ("left", "forward", "left"),
        ("weight", "backward", "left"),
        ("bias", "backward", "left"),
        ("factors", "backward", "left"),
    } <= inside


def test_the_last_backward_span_ends_with_the_pass() -> None:
    trace, net = Recorded(), make()
    hooks = TracingHooks(named_layers(net), trace)
    loss = net(torch.ones(2, 4))
    loss.backward()
    after_ns = trace.now()
    assert trace.names()[-1] == ("backward", "first")
    assert trace.spans[-1].ended_ns <= after_ns
    hooks.close()


class FakeEvent:
    """An event of a GPU that passes when it is told to."""

    def __init__(self, ms: float) -> None:
        self.ms, self.passed = ms, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.ms - self.ms


def test_spans_of_a_gpu_are_written_once_its_events_have_passed() -> None:
    made: list[FakeEvent] = []

    def event() -> FakeEvent:
        made.append(FakeEvent(float(len(made))))
        return made[-1]

    spans: list[tuple[Track, str, str, int, int]] = []
    trace = SimpleNamespace(now=lambda: 7, span=lambda *of: spans.append(of))
    device = DeviceSpans(trace, event)  # type: ignore[arg-type]
    device.end("a", device.begin())  # events 0 (the base), 1 and 2
    assert spans == [], "the training loop does not wait"
    made[2].passed = True
    device.end("b", device.begin())
    assert spans == [(Track.GPU, "forward", "a", 1_000_007, 2_000_007)]
    device.close()
    assert spans[1:] == [(Track.GPU, "forward", "b", 3_000_007, 4_000_007)]
