"""Which backward passes are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poseidon.torch.module_watch import OutputWatch

Pass = Callable[[nn.Module, Tensor], object]


class Checkpointed(nn.Module):
    """Two layers, the second of which is run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.second, self.first(x), use_reentrant=True)
        return result


def of_parameters(module: nn.Module, x: Tensor) -> object:
    return torch.autograd.grad(module(x).sum(), list(module.parameters()))


@pytest.mark.parametrize(
    ("module", "backward", "noticed"),
    [
        (nn.Linear(2, 2), lambda module, x: module(x).sum().backward(), 1),
        (Checkpointed(), lambda module, x: module(x).sum().backward(), 1),
        (nn.Linear(2, 2), lambda module, x: torch.autograd.grad(module(x).sum(), x), 0),
        (nn.Linear(2, 2), of_parameters, 0),
        (nn.Linear(2, 2), lambda module, x: x.sum().backward(), 0),
    ],
)
def test_what_is_heard_of(module: nn.Module, backward: Pass, noticed: int) -> None:
    count: list[bool] = []
    watch = OutputWatch(module, list(module.parameters()), lambda: count.append(True))
    backward(module, torch.ones(1, 2, requires_grad=True))
    watch.close()
    module(torch.ones(1, 2)).sum().backward()
    assert len(count) == noticed
