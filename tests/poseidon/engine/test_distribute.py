"""Any torch module on several workers: the weights are those of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.engine.distribute import Options
from poseidon.engine.group import Group
from poseidon.engine.update_rules import SGD, Adam, ParameterGroup
from poseidon.errors import UsageError
from poseidon.exchange.build import Membership
from poseidon.exchange.cost import ExchangeKind
from tests.support.module_groups import How, together

BATCH = 12
STEPS = 6


class Net(nn.Module):
    """Convolution, attention whose inner layer is never called, a layer used twice, one used never, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.wide = nn.Linear(24, 10)
        self.twice = nn.Linear(10, 10, bias=False)
        self.idle = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(10))
        self.last = nn.Linear(10, 4)
        self.tied = nn.Linear(10, 10, bias=False)
        self.tied.weight = self.twice.weight
        self.register_buffer("frequencies", torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, x_NCT: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x_NCT)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.wide(x.flatten(1))) * self.scale
        x = torch.tanh(self.twice(self.twice(x)) + self.tied(x))
        result: Tensor = self.last(x)
        return result


def build(rank: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        net = Net()
    return net


BUILDING = __import__("threading").Lock()


def build_alike(rank: int) -> Net:
    """Rank 0's values are the ones that count."""
    with BUILDING:  # the seed is the process's
        return build(rank)


def batches(passes: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    data = torch.Generator().manual_seed(5)
    return [
        [
            (torch.randn(BATCH, 3, 5, generator=data), torch.randn(BATCH, 4, generator=data))
            for _ in range(passes)
        ]
        for _ in range(STEPS)
    ]


def loop(passes: int = 1, **zeroing: bool) -> Callable[[nn.Module, Group], None]:
    def body(module: nn.Module, group: Group) -> None:
        for step in batches(passes):
            module.zero_grad(**zeroing)
            for x, y in step:
                own = slice(group.rank, None, group.size)
                (nn.functional.mse_loss(module(x[own]), y[own]) / passes).backward()
            group.step()

    return body


def assert_same(ends: list[dict[str, Tensor]], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
    for end in ends[1:]:
        for name, value in ends[0].items():
            assert torch.equal(end[name], value), name
    for name, value in expected.items():
        torch.testing.assert_close(
            ends[0][name], value, rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


RULES: dict[str, How] = {
    "sgd": SGD(lr=lambda step: 0.2 / (1 + step), momentum=0.9, weight_decay=0.01),
    "adam": Adam(lr=0.01, eps=1e-3),
    "groups": SGD(lr=0.1, groups=(ParameterGroup(names="*.bias", lr_factor=2, weight_decay_factor=0),)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),
    "torch adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize(
    "kind", [ExchangeKind.HYBRID, ExchangeKind.FACTORS, ExchangeKind.SERVER, ExchangeKind.ALLREDUCE]
)
@pytest.mark.parametrize("name", [*RULES, *OPTIMIZERS])
def test_two_workers_are_one_process(name: str, kind: ExchangeKind) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    (expected,) = together(1, build_alike, how, loop())
    options = Options(example=torch.randn(BATCH // 2, 3, 5))
    ends = together(2, build_alike, how, loop(), options=options, member=Membership(kind=kind, timeout_s=20))
    assert_same(ends, expected)
