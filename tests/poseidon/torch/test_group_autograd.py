"""What a loop may do with autograd: each loss trains workers to the values of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import BUILDING, Body, assert_same, member, together

STEPS, BATCH, RATE = 4, 8, 0.1
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def build(rank: int) -> nn.Sequential:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        )


def batches() -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 4, generator=data), torch.randn(BATCH, 3, generator=data))
        for _ in range(STEPS)
    ]


def plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=RATE)


def several_forwards(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first, second, third = module(x), module(2 * x), module(x - 1)
    return nn.functional.mse_loss(first, y) + second.square().mean() + third.mean()


def of_a_part(use_reentrant: bool) -> Loss:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(module, nn.Sequential)
        hidden = checkpoint(module[1:4], module[0](x), use_reentrant=use_reentrant)
        return nn.functional.mse_loss(module[4](hidden), y)

    return loss


def of_all(use_reentrant: bool) -> Loss:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return nn.functional.mse_loss(checkpoint(module, x, use_reentrant=use_reentrant), y)

    return loss


def two_checkpoints(use_reentrant: bool) -> Loss:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        parts = [checkpoint(module, part, use_reentrant=use_reentrant) for part in (x, 2 * x)]
        return nn.functional.mse_loss(parts[0] + parts[1], y)

    return loss


def functional_call(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = torch.func.functional_call(module, dict(module.named_parameters()), (x,))
    return nn.functional.mse_loss(output, y)


def gradient_penalty(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = module(x)
    (toward_x,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return nn.functional.mse_loss(output, y) + toward_x.square().mean()


USES: Mapping[str, Loss] = {
    "several forward passes": several_forwards,
    "a checkpoint of a part": of_a_part(use_reentrant=False),
    "a reentrant checkpoint of a part": of_a_part(use_reentrant=True),
    "a checkpoint of all": of_all(use_reentrant=False),
    "a reentrant checkpoint of all": of_all(use_reentrant=True),
    "two checkpoints": two_checkpoints(use_reentrant=False),
    "functional_call": functional_call,
    "a gradient penalty": gradient_penalty,
}


def loop(loss: Loss) -> Body:
    def body(module: nn.Module, group: Group) -> None:
        for x, y in batches():
            own = slice(group.rank, None, group.size)
            loss(module, x[own], y[own]).backward()
            group.step()

    return body


def alone(loss: Loss) -> dict[str, Tensor]:
    module = build(0)
    optimizer = plain(module)
    for x, y in batches():
        optimizer.zero_grad()
        loss(module, x, y).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("name", USES)
def test_whole_gradients_and_factors(name: str) -> None:
    loss = USES[name]
    expected = alone(loss)
    assert_same(together(2, build, plain, loop(loss)), expected)
    options = DistributeOptions(batch_size=BATCH // 2)
    job = member(ExchangeKind.FACTORS)
    ends = together(2, build, SGD(lr=RATE), loop(loss), options=options, member=job)
    assert_same(ends, expected)


def penalty_on_a_part(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = module.get_parameter("2.weight")
    return 1e-3 * weight[1:3].square().sum() + module.get_parameter("0.weight")[:, 1].square().sum()


def a_second_use(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = module.get_parameter("2.weight")
    return nn.functional.linear(nn.functional.linear(x, weight[:4, :4]), weight[:, :4]).mean()


MORE: Mapping[str, Loss] = {
    "a penalty on a part": penalty_on_a_part,
    "a second use": a_second_use,
    "a gradient penalty": gradient_penalty,
}


def begins_later(step: int, rank: int) -> bool:
    """On one worker at first, then on all."""
    return step >= 2 or (step == 1 and rank == 1)


def begins_at_once(step: int, rank: int) -> bool:
    return True


@pytest.mark.parametrize("how", [SGD(lr=RATE), plain], ids=["rule", "torch"])
@pytest.mark.parametrize(
    ("name", "begins"),
    [*((name, begins_later) for name in MORE), ("a penalty on a part", begins_at_once)],
)
def test_more_than_factors(
    name: str,
    begins: Callable[[int, int], bool],
    how: SGD | Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    workers = 3

    def of_worker(module: nn.Module, step: int, rank: int) -> Tensor:
        x, y = (part[:6][rank::workers] for part in batches()[step])
        loss = nn.functional.mse_loss(module(x), y)
        return loss + MORE[name](module, x, y) if begins(step, rank) else loss

    def body(module: nn.Module, group: Group) -> None:
        for step in range(STEPS):
            module.zero_grad()
            of_worker(module, step, group.rank).backward()
            group.step()

    alone = build(0)
    optimizer = plain(alone)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [of_worker(alone, step, rank) for rank in range(workers)]
        (torch.stack(losses).sum() / workers).backward()
        optimizer.step()
    options = DistributeOptions(batch_size=2)
    ends = together(workers, build, how, body, options=options, member=member(ExchangeKind.FACTORS))
    assert_same(ends, alone.state_dict())


def test_two_reentrant_checkpoints_of_the_same_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match=r"backward\(\) has run more than 1 time\(s\)"):
        together(1, build, plain, loop(two_checkpoints(use_reentrant=True)))


@pytest.mark.parametrize("how", [SGD(lr=RATE), plain], ids=["rule", "torch"])
def test_gradients_of_torch_func_are_handed_over(
    how: SGD | Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    def body(module: nn.Module, group: Group) -> None:
        parameters = dict(module.named_parameters())
        for x, y in batches():
            own = slice(group.rank, None, group.size)

            def loss(values: dict[str, Tensor], own: slice = own) -> Tensor:
                output = torch.func.functional_call(module, values, (x[own],))  # noqa: B023
                return nn.functional.mse_loss(output, y[own])  # noqa: B023

            values = {name: value.detach() for name, value in parameters.items()}
            gradients = torch.func.grad(loss)(values)
            torch.autograd.backward(list(parameters.values()), list(gradients.values()))
            group.step()

    assert_same(together(2, build, how, body), alone(functional_call))


def test_values_of_16_bits_come_within_a_transform() -> None:
    def body(module: nn.Module, group: Group) -> None:
        parameters = dict(module.named_parameters())

        def loss(values: dict[str, Tensor]) -> Tensor:
            x = torch.ones(2, 3, dtype=torch.bfloat16)
            result: Tensor = torch.func.functional_call(module, values, (x,))
            return result.sum()

        for _ in range(2):
            gradients = torch.func.grad(loss)(parameters)
            torch.autograd.backward(list(parameters.values()), list(gradients.values()))
            group.step()

    (end,) = together(1, lambda _: nn.Linear(3, 1, bias=False).bfloat16(), SGD(lr=RATE), body)
    assert end["weight"].isfinite().all()


def test_a_module_is_trained_in_phases() -> None:
    def phases(module: nn.Module, step: int) -> None:
        assert isinstance(module, nn.Sequential)
        module[0].requires_grad_(step < STEPS // 2)
        module[4].requires_grad_(step >= STEPS // 2)

    def body(module: nn.Module, group: Group) -> None:
        for step, (x, y) in enumerate(batches()):
            phases(module, step)
            own = slice(group.rank, None, group.size)
            nn.functional.mse_loss(module(x[own]), y[own]).backward()
            group.step()

    def momentum(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)

    module = build(0)
    optimizer = momentum(module)
    for step, (x, y) in enumerate(batches()):
        phases(module, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    assert_same(together(2, build, momentum, body), module.state_dict())
