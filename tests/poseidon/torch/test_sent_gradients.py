"""Gradients that change after they have left are noticed, also where no version shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.torch.sent_gradients import SentGradients
from ps_server.network import Network

REFUSAL = "they have left"


def noted(context: WorkerContext) -> tuple[SentGradients, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    for parameter in parameters[1:]:
        parameter.grad = torch.tensor([1.0, float("nan"), 2.0])
    sent = SentGradients(context, REFUSAL)
    sent.note(parameters)
    return sent, parameters


def test_what_stays_is_accepted_nan_too_and_then_forgotten() -> None:
    sent, parameters = noted(WorkerContext())
    sent.check()
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    sent.check()


@pytest.mark.parametrize("forgets", [False, True])
def test_what_changes_unseen_is_refused_unless_forgotten(forgets: bool) -> None:
    sent, parameters = noted(WorkerContext())
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    if forgets:
        sent.forget()
        sent.check()
    else:
        with pytest.raises(UsageError, match=REFUSAL):
            sent.check()


def of_host(rank: int) -> WorkerContext:
    """A worker of hosts with two workers and one: there is one plane."""
    member = Membership(network=Network(rank=rank, size=3), hosts=(2, 1))
    return replace(WorkerContext(), member=member)


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
