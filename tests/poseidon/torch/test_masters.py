"""Parameters of 16 bits: float32 on the shards, rounded in the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import BUILDING, How, assert_same, member, together

WORKERS, STEPS, BATCH = 2, 6, 8
RATE, MOMENTUM = 0.1, 0.9


class Mixed(nn.Module):
    """bfloat16, float16 and float32 in one module, a weight in two places, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.narrow = nn.Linear(6, 6, bias=False, dtype=torch.float16)
        self.tied = nn.Linear(6, 6, bias=False, dtype=torch.float16)
        self.tied.weight = self.narrow.weight
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm((self.first(x.bfloat16()) * self.scale).float()).half()
        result: Tensor = self.tied(torch.tanh(self.narrow(x).float()).half()).float()
        return result


def build(rank: int) -> Mixed:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(rank)
        return Mixed()


def batches() -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 4, generator=data), torch.randn(BATCH, 6, generator=data))
        for _ in range(STEPS)
    ]


def body(module: nn.Module, group: Group) -> None:
    for x, y in batches():
        own = slice(group.rank, None, group.size)
        nn.functional.mse_loss(module(x[own]), y[own]).backward()
        group.step()


def mean_gradients(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the float32 means of the workers' gradients."""
    total: dict[str, Tensor] = {}
    for rank in range(WORKERS):
        module.zero_grad()
        own = slice(rank, None, WORKERS)
        nn.functional.mse_loss(module(x[own]), y[own]).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad.float()
    return {name: gradient / WORKERS for name, gradient in total.items()}


def by_rule() -> dict[str, Tensor]:
    """Train one process whose float32 masters follow the rule."""
    module = build(0)
    parameters = dict(module.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in parameters.items()}
    history = {name: torch.zeros_like(master) for name, master in masters.items()}
    for x, y in batches():
        for name, gradient in mean_gradients(module, x, y).items():
            history[name].mul_(MOMENTUM).add_(RATE * gradient)
            masters[name].sub_(history[name])
            parameters[name].data.copy_(masters[name])
    return module.state_dict()


def by_optimizer() -> dict[str, Tensor]:
    module = build(0)
    optimizer = momentum(module)
    for x, y in batches():
        means = mean_gradients(module, x, y)
        for name, parameter in module.named_parameters():
            if name in means:
                parameter.grad = means[name].to(parameter.dtype)
        optimizer.step()
    return module.state_dict()


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)


def plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE)


RULE = SGD(lr=RATE, momentum=MOMENTUM)


@pytest.mark.parametrize("kind", [ExchangeKind.HYBRID, ExchangeKind.ALLREDUCE])
@pytest.mark.parametrize(("how", "alone"), [(RULE, by_rule), (momentum, by_optimizer)])
def test_workers_train_as_one_process_with_float32_masters(
    how: How, alone: Callable[[], dict[str, Tensor]], kind: ExchangeKind
) -> None:
    expected = alone()
    ends = together(WORKERS, build, how, body, member=member(kind))
    assert_same(ends, expected, rtol=0)
    assert {value.dtype for value in ends[0].values()} == {
        torch.bfloat16,
        torch.float16,
        torch.float32,
    }


@pytest.mark.parametrize("how", [SGD(lr=RATE), plain])
def test_moves_below_the_last_digit_add_up_under_a_rule(how: How) -> None:
    """A bfloat16 of 1 keeps no change of 0.001."""

    def ones(rank: int) -> nn.Module:
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        return module

    def small(module: nn.Module, group: Group) -> None:
        for _ in range(8):
            (module(torch.ones(1, 1, dtype=torch.bfloat16)) * 0.01).sum().backward()
            group.step()

    (end,) = together(1, ones, how, small)
    assert (float(end["weight"]) < 1) == isinstance(how, SGD)


def normed(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).bfloat16()


def test_statistics_of_16_bits_are_averaged() -> None:
    def run(module: nn.Module, group: Group) -> None:
        for _ in range(2):
            x = torch.full((4, 4), 1.0 + group.rank, dtype=torch.bfloat16)
            module(x).sum().backward()
            group.step()

    ends = together(2, normed, SGD(lr=0.0), run)
    assert_same(ends, {})
    assert float(ends[0]["1.running_mean"].abs().sum()) > 0


@pytest.mark.parametrize("how", [RULE, momentum])
def test_a_checkpoint_holds_the_masters(how: How) -> None:
    states: list[dict[str, Any]] = []

    def halfway(module: nn.Module, group: Group) -> None:
        for step, (x, y) in enumerate(batches()):
            nn.functional.mse_loss(module(x), y).backward()
            group.step()
            if step == 2:
                states.append(copy.deepcopy(group.state_dict()))

    def again(module: nn.Module, group: Group) -> None:
        group.load_state_dict(states[0])
        for x, y in batches()[3:]:
            nn.functional.mse_loss(module(x), y).backward()
            group.step()

    whole = together(1, build, how, halfway)
    assert_same(together(1, build, how, again), whole[0], rtol=0)
    names = {"first.weight", "first.bias", "narrow.weight"} if isinstance(how, SGD) else set()
    assert set(states[0]["masters"]) == names


MOVES = [
    (ExchangeKind.HYBRID, ExchangeKind.HYBRID),
    (ExchangeKind.HYBRID, ExchangeKind.ALLREDUCE),
    (ExchangeKind.ALLREDUCE, ExchangeKind.HYBRID),
]


@pytest.mark.parametrize(("first", "then"), MOVES)
def test_masters_go_from_the_shards_to_the_workers_and_back(
    first: ExchangeKind, then: ExchangeKind
) -> None:
    """With shards the module's own memory is all that a worker has."""
    states: list[dict[str, Any]] = []

    def train(module: nn.Module, group: Group, steps: slice) -> None:
        for x, y in batches()[steps]:
            own = slice(group.rank, None, group.size)
            nn.functional.mse_loss(module(x[own]), y[own]).backward()
            group.step()

    def halfway(module: nn.Module, group: Group) -> None:
        held = {trained.tensor.data_ptr() for trained in group._loop.update.plan.tensors}
        own = {parameter.data_ptr() for parameter in module.parameters()}
        assert (held <= own) == (first is ExchangeKind.HYBRID)
        train(module, group, slice(3))
        states.append(copy.deepcopy(group.state_dict()))

    def again(module: nn.Module, group: Group) -> None:
        group.load_state_dict(states[0] if group.rank == 0 else None)
        train(module, group, slice(3, None))

    together(WORKERS, build, RULE, halfway, member=member(first))
    states.sort(key=len, reverse=True)
    assert {master.dtype for master in states[0]["masters"].values()} == {torch.float32}
    assert set(states[0]["masters"]) == {"first.weight", "first.bias", "narrow.weight"}
    ends = together(WORKERS, build, RULE, again, member=member(then))
    assert_same(ends, by_rule(), rtol=0)


def test_local_steps_of_an_optimizer_need_float32() -> None:
    with pytest.raises(UsageError, match=r"'first.weight' is torch.bfloat16, and local steps"):
        together(1, build, momentum, body, options=DistributeOptions(local_steps=2))
