"""Tensors that the module's own forward moves: every replica ends each iteration with the mean
of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeOptions
from ps_server import Rule, RuleKind
from ps_server.network import Network
from tests.support.cluster import memory_store
from tests.support.exchanges import AloneExchange, plain_exchange, plain_store
from tests.support.threads import on_threads

ITERATIONS = 5
# Nothing of it may touch the statistics.
RULE = Rule(kind=RuleKind.ADAM, momentum=0.9, decay=0.5, rate_factor=3.0)
SETTINGS = ExchangeSettings(clip=0.01, gradient_scale=0.5)


class Counting(nn.Module):
    """One weight, and a blob that moves a tenth of the way to what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = nn.Parameter(torch.full((2, 3), 7.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x, alpha=0.1)
        return (x * self.weight).sum()


def sight(rank: int, iteration: int, part: int) -> Tensor:
    return torch.randn(
        2, 3, generator=torch.Generator().manual_seed(100 * rank + 10 * iteration + part)
    )


def body(
    exchange: Exchange, net: Counting, tensors: Sequence[Trained], rank: int, passes: int
) -> None:
    hooks = Hooks([net], tensors, exchange, passes=passes)
    exchange.open(None)
    for iteration in range(ITERATIONS):
        exchange.start(iteration, 0.1)
        hooks.start()
        for part in range(passes):
            net(sight(rank, iteration, part)).backward()
            hooks.next_pass()
        hooks.finish()
        exchange.finish()
    exchange.settle()
    hooks.close()


def tensors_of(net: Counting) -> list[Trained]:
    return [
        Trained(name="weight", tensor=net.weight, rule=RULE),
        Trained(name="seen", tensor=net.seen, rule=RULE, statistics=True),
    ]


def trained(workers: int, *, staleness: int = 0, passes: int = 1) -> list[np.ndarray]:
    """Each replica's statistics after training over two shards."""
    with memory_store(workers, 2) as connect:

        def run(rank: int) -> np.ndarray:
            net = Counting()
            tensors = tensors_of(net)
            store = plain_store(
                tensors,
                SETTINGS,
                Membership(
                    network=Network(size=workers),
                    shards=2,
                    options=ExchangeOptions(staleness=staleness, rows=2),
                ),
            )
            exchange = plain_exchange(connect(rank, store), tensors, store, SETTINGS)
            try:
                body(exchange, net, tensors, rank, passes)
                return net.seen.numpy().copy()
            finally:
                exchange.close()

        return on_threads(workers, run)


def expected(workers: int, passes: int = 1) -> np.ndarray:
    """By hand: each moves from the common value, then all take the mean."""
    common = torch.full((2, 3), 7.0)
    for iteration in range(ITERATIONS):
        total = torch.zeros(2, 3)
        for rank in range(workers):
            own = common.clone()
            for part in range(passes):
                own.mul_(0.9).add_(sight(rank, iteration, part), alpha=0.1)
            total += own
        common = total / workers
    return common.numpy()


@pytest.mark.parametrize(("workers", "passes"), [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_replicas_take_the_mean_bit_for_bit(workers: int, passes: int) -> None:
    for end in trained(workers, passes=passes):
        assert np.array_equal(end, expected(workers, passes))


def test_without_a_server_they_are_as_forward_left_them() -> None:
    net = Counting()
    body(AloneExchange(tensors_of(net), SETTINGS), net, tensors_of(net), 0, 1)
    assert np.array_equal(net.seen.numpy(), expected(1))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [1, 2])
def test_stale_replicas_settle_on_one_value_near_the_mean(workers: int, staleness: int) -> None:
    ends = trained(workers, staleness=staleness)
    for end in ends:
        np.testing.assert_allclose(end, ends[0], rtol=1e-6)
        # Seven tenths of a way of about 7 are certain; what was seen too late is a tenth of a sight
        # each.
        np.testing.assert_allclose(end, expected(workers), atol=0.6 if workers > 1 else 1e-5)
