from __future__ import annotations

import torch
from torch import Tensor, nn

from poseidon.exchange.observe.tracing_hooks import TracingHooks, named_layers
from tests.support.tracing import Recorded, nested


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


def train(net: Net, steps: int) -> list[Tensor]:
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
    traced = train(net, 3)
    hooks.close()
    forward = [name for kind, name in trace.names() if kind == "forward"]
    assert forward == ["first", "act", "same", "halves", "left", "right"] * 3
    backward = [name for kind, name in trace.names() if kind == "backward"]
    # `same` adds nothing to the graph, so it has no backward.
    assert backward == ["right", "left", "halves", "act", "first"] * 3
    assert nested(trace.spans)
    assert all(torch.equal(a, b) for a, b in zip(traced, train(make(), 3), strict=True))


def test_after_close_nothing_is_told() -> None:
    trace, net = Recorded(), make()
    TracingHooks(named_layers(net), trace).close()
    train(net, 1)
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
    train(net, 1)
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
