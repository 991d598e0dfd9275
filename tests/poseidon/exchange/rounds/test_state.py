"""The virtual workers of a process have values and histories of their own within a round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.carrier import Step
from poseidon.exchange.rounds.state import InnerWorkers
from ps_server import Rule, RuleKind
from tests.support.exchanges import AloneExchange

WORKERS, STEPS, RATE = 3, 4, 0.1
CLIPPED = ExchangeSettings(clip=1.0, gradient_scale=0.5)


def gradient(step: int, worker: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + worker))


@pytest.mark.parametrize(
    "rule", [Rule(momentum=0.9, decay=0.1), Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-3)]
)
def test_each_has_the_steps_of_a_process_of_its_own(rule: Rule) -> None:
    """Statistics stay as the passes of its turns have left them."""
    expected = []
    for worker in range(WORKERS):
        own = Trained(name="w", tensor=torch.ones(2, 3), rule=rule)
        exchange = AloneExchange([own], CLIPPED)
        exchange.open(None)
        for step in range(STEPS):
            exchange.start(step, RATE)
            exchange.begin(0, gradient(step, worker))
            exchange.finish()
        expected.append((own.tensor, exchange.state.histories()[0]))

    weight, mean = torch.zeros(2, 3), torch.zeros(2)
    tensors = [
        Trained(name="w", tensor=weight, rule=rule),
        Trained(name="m", tensor=mean, statistics=True),
    ]
    inner = InnerWorkers(tensors, CLIPPED, count=WORKERS)
    inner.open([None] * WORKERS, None)
    inner.set([torch.ones(2, 3), torch.ones(2)])
    for step in range(STEPS):
        inner.start(Step(step, (RATE,)))
        for worker in range(WORKERS):
            if worker:
                inner.next()
            mean.add_(worker)
            inner.begin(0, gradient(step, worker))
        inner.finish()
    for worker, (value, history) in enumerate(expected):
        assert torch.equal(inner.values(0)[worker], value)
        found = inner.histories[worker].histories()[0]
        assert all((a == b).all() for a, b in zip(found, history, strict=True))
        assert inner.values(1)[worker].tolist() == [1 + STEPS * worker] * 2
    assert inner.values(0)[0].data_ptr() == weight.data_ptr()


def test_one_has_no_copy_of_its_values() -> None:
    tensors = [Trained(name="w", tensor=torch.ones(2, 3))]
    inner = InnerWorkers(tensors, CLIPPED, count=1)
    assert [value.data_ptr() for value in inner.values(0)] == [tensors[0].tensor.data_ptr()]
