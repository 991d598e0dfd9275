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


def test_the_gradients_of_a_leader_may_change() -> None:
    """They become the mean of its host's workers."""
    leader = replace(WorkerContext(), member=Membership(local_workers=2, local_rank=0))
    sent, parameters = noted(leader)
    parameters[1].grad.data.mul_(2)  # type: ignore[union-attr]
    sent.check()
