"""An optimizer makes a step for each virtual worker of a process, with a state for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from poseidon.errors import UsageError
from poseidon.torch.own_states import OwnOptimizerStates

WORKERS, STEPS = 3, 4
OPTIMIZERS = [
    lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam([p], lr=torch.tensor(0.1), amsgrad=True),
    lambda p: torch.optim.Adagrad([p], lr=0.1),
]


def gradient(step: int, worker: int) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(10 * step + worker))


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_each_virtual_worker_has_the_steps_of_an_optimizer_of_its_own(make: Any) -> None:
    expected = []
    for worker in range(WORKERS):
        own = torch.nn.Parameter(torch.ones(3))
        optimizer = make(own)
        for step in range(STEPS):
            own.grad = gradient(step, worker)
            optimizer.step()
        expected.append(own.detach())

    shared = torch.nn.Parameter(torch.ones(3))
    optimizer = make(shared)
    turns = OwnOptimizerStates(optimizer, WORKERS)
    values = [torch.ones(3) for _ in range(WORKERS)]
    for step in range(STEPS):
        for worker in range(WORKERS):
            shared.data.copy_(values[worker])
            shared.grad = gradient(step, worker)
            turns.enter(worker)
            turns.before_step()
            optimizer.step()
            turns.after_step()
            values[worker].copy_(shared.data)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


class Counting(torch.optim.SGD):
    """Keeps a number in its parameter groups: of steps, or one that follows from gradients."""

    adapts = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        (group,) = self.param_groups
        moved = float(group["params"][0].grad.sum()) if self.adapts else 1
        group["k"] = group.get("k", 0) + moved
        return result


def test_options_of_parameter_groups_belong_to_all() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Counting([parameter], lr=0.1)
    turns = OwnOptimizerStates(optimizer, WORKERS)

    def turn(worker: int) -> None:
        parameter.grad = gradient(0, worker)
        turns.enter(worker)
        turns.before_step()
        optimizer.step()
        turns.after_step()

    for number in range(2 * WORKERS):
        turn(number % WORKERS)
    assert optimizer.param_groups[0]["k"] == 2
    optimizer.adapts = True
    turn(0)
    with pytest.raises(UsageError, match=r"Counting has set 'k' to .* for one virtual worker"):
        turn(1)
