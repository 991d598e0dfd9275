"""Hosts with different numbers of workers, each of which counts the same, within a staleness bound;
workers that own nothing, since the tensors are small.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Rule
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import TIMEOUT_S, job_addresses
from tests.support.machines import machines, member_on
from tests.support.threads import on_threads

ITERATIONS, RATE = 4, 0.1
SHAPES = [(4, 6), (3, 5)]


def factors(rank: int, iteration: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return u and v of a gradient that no weight has an influence on."""
    draw = torch.Generator().manual_seed(100 * iteration + rank)
    return torch.randn(2, shape[0], generator=draw), torch.randn(2, shape[1], generator=draw)


def trained(
    kind: ExchangeKind, hosts: Sequence[int], *, clip: float | None, by_number: bool
) -> list[list[Tensor]]:
    """Return the weights of all workers after some iterations, which begin with zeros."""
    size = sum(hosts)
    virtual = VirtualWorkers.one_each(size) if by_number else None

    def train(rank: int) -> list[Tensor]:
        tensors = [
            Trained(name=f"w{n}", tensor=torch.zeros(shape), rule=Rule(), factor_rows=1)
            for n, shape in enumerate(SHAPES)
        ]
        options = ExchangeOptions(kind=kind, staleness=2)
        member = member_on(rank, hosts, folder, shards=2, options=options, virtual_workers=virtual)
        settings = ExchangeSettings(clip=clip)
        exchange = build_exchange(tensors, settings, member, connect.of(rank)).exchange
        try:
            exchange.open(None)
            for iteration in range(ITERATIONS):
                exchange.start(iteration, RATE)
                for index, shape in enumerate(SHAPES):
                    exchange.wait(index)
                    u, v = factors(rank, iteration, shape)
                    if index in exchange.by_factors:
                        exchange.begin_factors(index, u, v)
                        exchange.release(index)
                    else:
                        exchange.begin(index, u.t() @ v)
                exchange.finish()
            exchange.settle()
            return [trained.tensor.clone() for trained in tensors]
        finally:
            exchange.close()

    with TemporaryDirectory(prefix="p") as folder, job_addresses(kind, size, 2) as connect:
        return on_threads(size, train)


def expected(hosts: Sequence[int], clip: float | None) -> list[Tensor]:
    """Return the weights of plain SGD on the mean over all workers; with a limit each host scales
    its own mean to it.
    """
    ends, weights = torch.tensor(hosts).cumsum(0).tolist(), [torch.zeros(shape) for shape in SHAPES]
    for iteration in range(ITERATIONS):
        for end, workers in zip(ends, hosts, strict=True):
            means = []
            for shape in SHAPES:
                pairs = [factors(rank, iteration, shape) for rank in range(end - workers, end)]
                means.append(sum(u.t() @ v for u, v in pairs) / workers)
            norm = torch.stack([mean.square().sum() for mean in means]).sum().sqrt().item()
            limit = 1.0 if clip is None else min(1.0, clip / norm)
            for weight, mean in zip(weights, means, strict=True):
                weight.sub_(mean, alpha=RATE * limit * workers / ends[-1])
    return weights


@pytest.mark.parametrize(
    ("kind", "hosts", "clip", "by_number"),
    [
        (ExchangeKind.SERVER, (2, 1), None, False),
        (ExchangeKind.FACTORS, (1, 3), None, True),
        (ExchangeKind.SERVER, (1, 3), 2.0, False),
        (ExchangeKind.FACTORS, (1, 3), 2.0, False),
        (ExchangeKind.SERVER, (2, 2), None, True),
    ],
)
def test_each_worker_counts_the_same_within_a_bound(
    kind: ExchangeKind, hosts: tuple[int, ...], clip: float | None, by_number: bool
) -> None:
    means = expected(hosts, clip)
    for weights in trained(kind, hosts, clip=clip, by_number=by_number):
        for weight, mean in zip(weights, means, strict=True):
            torch.testing.assert_close(weight, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "hosts", "shards", "staleness"),
    [
        (ExchangeKind.ALLREDUCE, (2, 2), 0, 0),
        (ExchangeKind.SERVER, (3,), 0, 0),
        (ExchangeKind.SERVER, (2, 2), 2, 0),
        (ExchangeKind.SERVER, (2, 2), 2, 1),
    ],
)
def test_an_owner_of_nothing_gives_its_state_while_its_worker_is_ahead(
    kind: ExchangeKind, hosts: tuple[int, ...], shards: int, staleness: int
) -> None:
    """Rank 0 alone collects the state; the others have begun the next iteration before it asks."""
    size = sum(hosts)
    ahead = threading.Semaphore(0)

    def train(rank: int) -> None:
        tensors = [Trained(name="w", tensor=torch.zeros(4, 6), rule=Rule())]
        exchange = make(rank, tensors, ExchangeSettings(clip=1.0))

        def iterate(iteration: int) -> None:
            exchange.start(iteration, RATE)
            exchange.wait(0)
            exchange.begin(0, torch.full((4, 6), 1.0 + rank))
            exchange.finish()

        try:
            exchange.open(None)
            iterate(0)
            exchange.settle()
            if rank:
                iterate(1)
                ahead.release()
            else:
                for _ in range(size - 1):
                    assert ahead.acquire(timeout=TIMEOUT_S)
                assert [*exchange.state.histories()] == [0]
                iterate(1)
            exchange.settle()
            exchange.control.all_gather(b"")
        finally:
            exchange.close()

    with machines(kind, hosts, shards=shards, staleness=staleness) as make:
        on_threads(size, train)
