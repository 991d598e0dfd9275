"""The promise of exactness, whole: every rule by every exchange, on one to three workers, with
several passes and limits.

`scripts/test --thorough tests/poseidon/exchange` runs all; in every run are those in which each
two values meet.

After twelve iterations the weights equal the weights of one process with the whole batch, to 1e-5,
and a second run has the same bits. The net has what makes the ways differ: convolutions and
fully-connected layers, each large enough for a table of its own and small enough to share one, and
biases. Two workers cut every tensor into pieces, which no tensors share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Built, Connect
from poseidon.exchange.factors.taps import layers_with_factors
from poseidon.exchange.hooks import Hooks
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions, Scheme
from ps_server import Rule, RuleKind
from ps_server.network import Network
from ps_server.protocol.placement import Chunk, place
from tests.support.cluster import TIMEOUT_S, TOKEN, job_addresses
from tests.support.sampling import sample_of_pairs
from tests.support.threads import on_threads

BATCH = 12  # of all workers together, a pass
ITERATIONS = 12
SHARDS = 2
PIECES = {1: 0, 2: 2, 3: 0}
"""Of each table, by the number of workers; 0: as large as it is, and small tensors share one."""
# Where a rule divides by a root of small gradients its delta keeps rounding from being magnified
# without bound.
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


KINDS = [kind for kind in ExchangeKind if kind is not ExchangeKind.LOCAL]
PASSES = (1, 2)
CLIPS = (None, 0.05)


class Net(nn.Module):
    """A small and a large convolution, a large and a small fully-connected layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.large = nn.Linear(128, 64)
        self.small = nn.Linear(64, 2)
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.2, 0.2, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv2(torch.tanh(self.conv(x)))).flatten(1)
        result: Tensor = self.small(torch.tanh(self.large(x)))
        return result


def train(
    rank: int, workers: int, case: Case, build: Callable[..., Built]
) -> tuple[list[np.ndarray], Built]:
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
    hooks = Hooks([net], tensors, exchange, passes=case.passes)
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
    alone = Membership(options=ExchangeOptions(kind=ExchangeKind.LOCAL))
    return train(
        0, 1, case, lambda tensors, settings: build_exchange(tensors, settings, alone, list)
    )[0]


def run(
    kind: ExchangeKind, workers: int, case: Case, schemes: Sequence[Scheme] = ()
) -> tuple[list[list[np.ndarray]], Built]:
    """A job with its workers as threads; their final weights, by rank.

    `auto` takes these schemes, or measures.
    """

    def worker(rank: int, connect: Connect) -> tuple[list[np.ndarray], Built]:
        member = Membership(
            network=Network(rank=rank, size=workers, token=TOKEN, timeout_s=TIMEOUT_S),
            shards=SHARDS,
            options=ExchangeOptions(rows=PIECES[workers], kind=kind),
        )
        return train(
            rank, workers, case, lambda t, s: build_exchange(t, s, member, connect, schemes=schemes)
        )

    with job_addresses(kind, workers, SHARDS) as connect:
        ends = on_threads(workers, lambda rank: worker(rank, connect.of(rank)))
    return [weights for weights, _ in ends], ends[0][1]


@pytest.mark.parametrize(
    ("kind", "workers", "rule", "passes", "clip"),
    sample_of_pairs(KINDS, (1, 2, 3), [*RULES], PASSES, CLIPS),
)
def test_the_weights_are_those_of_one_process_and_of_a_second_run(
    kind: ExchangeKind, workers: int, rule: RuleKind, passes: int, clip: float | None
) -> None:
    case = Case(rule, passes, clip)
    ends, built = run(kind, workers, case)
    again, _ = run(kind, workers, case, schemes_of(built))
    for end in (*ends[1:], *again):
        assert all(np.array_equal(a, b) for a, b in zip(ends[0], end, strict=True))
    difference = largest_difference(ends[0], reference(case))
    print(f"largest difference {difference:.1e}")
    assert difference <= 1e-5


def schemes_of(built: Built) -> list[Scheme]:
    """The schemes of a run, which another run of `auto` needs for its bits."""
    return [choice.scheme for choice in built.plan.choices]


def largest_difference(mine: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> float:
    """Of any weight, relative to the weight where that is above 1."""
    pairs = zip(mine, whole, strict=True)
    return max(float((np.abs(a - b) / np.maximum(np.abs(b), 1)).max()) for a, b in pairs)


def chunks_of(built: Built) -> list[Chunk]:
    """Where the pieces of the tables are."""
    assert built.store is not None
    return [chunk for row in place(built.store).chunks for chunk in row]


def test_several_tables_on_several_shards_take_part() -> None:
    """Or the order in which tables leave, and a norm over shards, would not be tried."""
    _, built = run(ExchangeKind.SERVER, 3, Case(RuleKind.SGD, 1, 0.05))
    chunks = chunks_of(built)
    assert len({chunk.table for chunk in chunks}) == 3  # two layers' own, and one that is shared
    assert len({chunk.shard for chunk in chunks}) == SHARDS
    assert sorted(map(len, built.tables)) == [1, 1, 6]


def test_the_ways_are_what_the_kind_says() -> None:
    case = Case(RuleKind.SGD, 2, None)
    built = {kind: run(kind, 2, case)[1] for kind in KINDS}
    ways = {kind: one.plan for kind, one in built.items()}
    assert [c.name for c in ways[ExchangeKind.FACTORS].choices if c.scheme is Scheme.FACTORS] == [
        "large.weight",
        "small.weight",
    ]
    assert [c.name for c in ways[ExchangeKind.HYBRID].choices if c.scheme is Scheme.FACTORS] == [
        "large.weight"
    ]
    assert not ways[ExchangeKind.SERVER].of(Scheme.FACTORS)
    assert len(ways[ExchangeKind.ALLREDUCE].of(Scheme.ALLREDUCE)) == 8
    pieces = chunks_of(built[ExchangeKind.SERVER])
    assert [len({c.shard for c in pieces if c.table == table}) for table in range(8)] == [
        SHARDS
    ] * 8
