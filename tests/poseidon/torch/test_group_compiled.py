"""torch.compile before distribute(): one graph, the numbers of the module that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import poseidon
from poseidon.exchange.membership import Membership
from poseidon.exchange.module_hooks import uncompiled
from poseidon.torch.ddp import default_group
from poseidon.torch.group import Group
from poseidon.torch.process_group.mesh import Mesh
from poseidon.torch.update_rules import SGD
from ps_server.network import Network
from tests.poseidon.torch.test_ddp import destroyed_at_end, mesh
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import How, together

__all__ = ["mesh"]  # a fixture

X = torch.linspace(-1, 1, 48).view(8, 6)
RULE = SGD(lr=lambda step: 0.1 / (1 + step), momentum=0.9)


def torch_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 2)
        for place, parameter in enumerate(self.parameters()):
            parameter.data = torch.linspace(-1, 1 + place, parameter.numel()).view(parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.wide(x))))
        return result


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(_: int = 0) -> nn.Module:
    return torch.compile(Net(), backend="eager", fullgraph=True)


def steps(count: int) -> Callable[[nn.Module, Group], None]:
    def body(module: nn.Module, group: Group) -> None:
        for _ in range(count):
            module(X[group.rank :: group.size]).square().mean().backward()
            group.step()
            module.zero_grad()

    return body


@pytest.mark.parametrize(
    "how", [RULE, pytest.param(torch_sgd, marks=pytest.mark.thorough)], ids=["rule", "optimizer"]
)
def test_one_graph_has_the_bits_of_none(how: How) -> None:
    (expected,) = together(1, lambda _: Net(), how, steps(4))
    (end,) = together(1, compiled, how, steps(4))
    assert {name.removeprefix("_orig_mod."): value.tolist() for name, value in end.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.thorough
def test_its_values_are_awaited_on_several_workers_compiled_or_not() -> None:
    """The module within is used as well, without a graph."""
    expected = together(
        2, lambda _: Net(), RULE, steps(4), member=Membership(network=Network(timeout_s=TIMEOUT_S))
    )

    def body(module: nn.Module, group: Group) -> None:
        for step in range(4):
            used = uncompiled(module) if step % 2 else module
            used(X[group.rank :: group.size]).square().mean().backward()
            group.step()

    ends = together(
        2, compiled, RULE, body, member=Membership(network=Network(timeout_s=TIMEOUT_S))
    )
    for end in ends:
        for name, value in expected[0].items():
            assert torch.equal(end[f"_orig_mod.{name}"], value), name


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph goes on
def test_compiled_later_its_hooks_end_graphs_and_are_not_traced() -> None:
    (expected,) = together(1, lambda _: Net(), RULE, steps(4))
    module = Net()
    with poseidon.distribute(module, RULE) as group:
        steps(4)(torch.compile(module, backend="eager"), group)
    for name, value in expected.items():
        assert torch.equal(module.state_dict()[name], value), name
    assert counters["graph_break"]
    assert all(
        "call torch.compile(module) before distribute()" in reason
        for reason in counters["graph_break"]
    )


def test_a_state_has_the_names_of_the_module_within() -> None:
    module = compiled()
    group = poseidon.distribute(module, RULE)
    steps(1)(module, group)
    state = group.state_dict()
    assert "wide.weight" in state["model"]
    again = poseidon.distribute(Net(), RULE)  # which need not be compiled
    again.load_state_dict(state)
    assert again.steps == 1


def test_a_compiled_module_of_ddp_broadcasts_its_buffers_outside_of_graphs(mesh: Mesh) -> None:
    with default_group(mesh), destroyed_at_end():
        module = torch.compile(DistributedDataParallel(Net()), backend="eager")
        module(X).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
