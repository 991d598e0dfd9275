"""Which backward passes are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.torch.module_watch import OutputWatch, SentGradients
from ps_server.network import Network

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


REFUSAL = "they have left"


def noted(member: Membership) -> tuple[SentGradients, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    for parameter in parameters[1:]:
        parameter.grad = torch.tensor([1.0, float("nan"), 2.0])
    sent = SentGradients(member, REFUSAL)
    sent.note(parameters)
    return sent, parameters


def test_what_stays_is_accepted_nan_too_and_then_forgotten() -> None:
    sent, parameters = noted(Membership())
    sent.check()
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    sent.check()


@pytest.mark.parametrize("forgets", [False, True])
def test_what_changes_unseen_is_refused_unless_forgotten(forgets: bool) -> None:
    sent, parameters = noted(Membership())
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    if forgets:
        sent.forget()
        sent.check()
    else:
        with pytest.raises(UsageError, match=REFUSAL):
            sent.check()


def of_host(rank: int) -> Membership:
    """A worker of hosts with two workers and one: there is one plane."""
    return Membership(network=Network(rank=rank, size=3), hosts=(2, 1))


def test_the_gradients_of_an_owner_may_change() -> None:
    """They become the sum of its host's workers."""
    sent, parameters = noted(of_host(0))
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    sent.check()


@pytest.mark.parametrize("rank", [1, 2])
def test_the_gradients_of_others_may_not(rank: int) -> None:
    """A worker that owns nothing, and one that is alone on its host."""
    sent, parameters = noted(of_host(rank))
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=REFUSAL):
        sent.check()
