"""The promise of exactness, whole: every rule by every exchange, on one to three workers, with several passes and limits.

`scripts/test --thorough tests/poseidon/exchange` runs all 288; a sample of them is in every run.

After twenty iterations the weights are those of one process with the whole batch, to 1e-5, and a second run has the same
bits. The net has what makes the ways differ: convolutions, fully-connected layers large and small, biases.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import Built, Membership, build_exchange
from poseidon.exchange.cost import ExchangeKind, Scheme
from poseidon.exchange.factor_taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from ps_server import Rule, RuleKind
from tests.support.cluster import TIMEOUT_S, TOKEN, shards_on_sockets
from tests.support.sampling import sample

BATCH = 12  # of all workers together, a pass
ITERATIONS = 20
SHARDS = 2
# Where a rule divides by a root of small gradients its delta keeps rounding from being magnified without bound.
RULES = {
    RuleKind.SGD: Rule(momentum=0.9, decay=0.005),
    RuleKind.NESTEROV: Rule(kind=RuleKind.NESTEROV, momentum=0.9, decay=0.005),
    RuleKind.ADAGRAD: Rule(kind=RuleKind.ADAGRAD, delta=1e-2, decay=0.005),
    RuleKind.RMSPROP: Rule(kind=RuleKind.RMSPROP, rms_decay=0.9, delta=1e-1, decay=0.005),
    RuleKind.ADADELTA: Rule(kind=RuleKind.ADADELTA, momentum=0.9, delta=1e-3, decay=0.005),
    RuleKind.ADAM: Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-1, decay=0.005),
}


@dataclass(frozen=True)
class Case:
    rule: RuleKind
    passes: int
    clip: float | None


CASES = [Case(rule, passes, clip) for rule, passes, clip in itertools.product(RULES, (1, 2), (None, 0.05))]


class Net(nn.Module):
    """A convolution, a large and a small fully-connected layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.large = nn.Linear(48, 40)
        self.small = nn.Linear(40, 2)
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.2, 0.2, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        result: Tensor = self.small(torch.tanh(self.large(x)))
        return result


def train(rank: int, workers: int, case: Case, build: Callable[..., Built]) -> tuple[list[np.ndarray], Built]:
    net = Net()
    rows = BATCH // workers * case.passes
    factors = layers_with_factors(net)
    tensors = [
        Trained(name=n, tensor=p, rule=RULES[case.rule], factor_rows=rows if p in factors else 0)
        for n, p in net.named_parameters()
    ]
    settings = ExchangeSettings(clip=case.clip, gradient_scale=1 / case.passes)
    built = build(tensors, settings)
    exchange = built.exchange
    hooks = Hooks(net, tensors, exchange, passes=case.passes)
    data = torch.Generator().manual_seed(1)
    try:
        exchange.open(None)
        for iteration in range(ITERATIONS):
            exchange.start(iteration, 0.05 / (1 + 0.1 * iteration))
            hooks.start()
            for _ in range(case.passes):
                x = torch.randn(BATCH, 1, 6, 6, generator=data)[rank::workers]
                y = torch.randn(BATCH, 2, generator=data)[rank::workers]
                nn.functional.mse_loss(net(x), y).backward()
                hooks.next_pass()
            hooks.finish()
            exchange.finish()
        exchange.settle()
        return [p.detach().numpy().copy() for p in net.parameters()], built
    finally:
        hooks.close()
        exchange.close()


@functools.cache
def reference(case: Case) -> list[np.ndarray]:
    """One process with the whole batch."""
    alone = Membership(kind=ExchangeKind.LOCAL)
    return train(0, 1, case, lambda tensors, settings: build_exchange(tensors, settings, alone, list))[0]


def run(kind: ExchangeKind, workers: int, case: Case) -> tuple[list[list[np.ndarray]], Built]:
    """A job with its workers as threads; their final weights, by rank."""
    ends: dict[int, tuple[list[np.ndarray], Built]] = {}
    failures: list[BaseException] = []

    def worker(rank: int, addresses: Sequence[str]) -> None:
        member = Membership(
            rank=rank, workers=workers, shards=SHARDS, kind=kind, token=TOKEN, timeout_s=TIMEOUT_S
        )
        try:
            ends[rank] = train(
                rank, workers, case, lambda t, s: build_exchange(t, s, member, lambda: addresses)
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    with shards_on_sockets(workers, SHARDS) as addresses:
        threads = [threading.Thread(target=worker, args=(rank, addresses)) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return [ends[rank][0] for rank in range(workers)], ends[0][1]


KINDS = [kind for kind in ExchangeKind if kind is not ExchangeKind.LOCAL]


@pytest.mark.parametrize(
    ("kind", "workers", "case"), sample([*itertools.product(KINDS, (1, 2, 3), CASES)], every=5)
)
def test_the_weights_are_those_of_one_process(kind: ExchangeKind, workers: int, case: Case) -> None:
    ends, _ = run(kind, workers, case)
    for end in ends[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(ends[0], end, strict=True))
    for mine, whole in zip(ends[0], reference(case), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "case"), sample([*itertools.product(KINDS, CASES[:: len(CASES) // 6])], every=5)
)
def test_a_second_run_has_the_same_bits(kind: ExchangeKind, case: Case) -> None:
    (first, _), (second, _) = run(kind, 3, case), run(kind, 3, case)
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_the_ways_are_what_the_kind_says() -> None:
    case = Case(RuleKind.SGD, 2, None)
    ways = {kind: run(kind, 2, case)[1].plan for kind in KINDS}
    assert [c.name for c in ways[ExchangeKind.FACTORS].choices if c.scheme is Scheme.FACTORS] == [
        "large.weight",
        "small.weight",
    ]
    assert [c.name for c in ways[ExchangeKind.HYBRID].choices if c.scheme is Scheme.FACTORS] == [
        "large.weight"
    ]
    assert not ways[ExchangeKind.SERVER].of(Scheme.FACTORS)
    assert len(ways[ExchangeKind.ALLREDUCE].of(Scheme.ALLREDUCE)) == 6
