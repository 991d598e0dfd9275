"""What a snapshot holds of an exchange whose pieces belong to several workers of a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from poseidon.exchange.base import Array, ExchangeSettings, History, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.host.pieces import LEAST_ELEMENTS
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Rule, RuleKind
from ps_server.protocol.virtual_workers import VirtualWorkers
from tests.support.cluster import job_addresses
from tests.support.machines import member_on
from tests.support.threads import on_threads

SHAPES = [(2, LEAST_ELEMENTS), (30, 40), (40,), (5 * LEAST_ELEMENTS // 2,)]
ADAM = Rule(kind=RuleKind.ADAM, momentum=0.9)
VIRTUAL = 4


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The state of a job after some iterations."""

    iteration: int
    values: Sequence[Array]
    histories: Sequence[History]
    held_back: dict[str, Array]


def tensors() -> list[Trained]:
    draw = torch.Generator().manual_seed(1)
    return [
        Trained(name=f"w{number}", tensor=torch.randn(shape, generator=draw), rule=ADAM)
        for number, shape in enumerate(SHAPES)
    ]


def train(
    hosts: Sequence[int], stop: int, *, begin: Saved | None = None, **options: Any
) -> list[Saved]:
    """Return the state of each worker of hosts with so many workers each, after the iterations
    before `stop`.
    """
    workers = sum(hosts)
    placed = VirtualWorkers.spread(VIRTUAL, [1.0] * workers)

    def run(rank: int) -> Saved:
        member = member_on(
            rank,
            hosts,
            folder,
            shards=2,
            virtual_workers=placed,
            options=ExchangeOptions(kind=ExchangeKind.SERVER, **options),
        )
        own, first = tensors(), 0 if begin is None else begin.iteration
        if begin is not None and rank == 0:
            for trained, value in zip(own, begin.values, strict=True):
                trained.tensor.copy_(torch.from_numpy(value))
        exchange = build_exchange(
            own, ExchangeSettings(start_clock=first), member, connect.of(rank)
        ).exchange
        try:
            if begin is not None and rank == 0:
                exchange.state.hold_back(begin.held_back)
            exchange.open(None if begin is None or rank else begin.histories)
            for iteration in range(first, stop):
                exchange.start(iteration, 0.05)
                for virtual in member.own:
                    if virtual != member.own.start:
                        exchange.next_virtual_worker()
                    draw = torch.Generator().manual_seed(100 * iteration + virtual)
                    for index in reversed(range(len(own))):
                        exchange.wait(index)
                        exchange.begin(index, torch.randn(SHAPES[index], generator=draw))
                exchange.finish()
            exchange.settle()
            return Saved(
                iteration=stop,
                values=[trained.tensor.numpy().copy() for trained in own],
                histories=list(exchange.state.histories().values()) if rank == 0 else [],
                held_back=dict(exchange.state.held_back()),
            )
        finally:
            exchange.close()

    with (
        TemporaryDirectory(prefix="p") as folder,
        job_addresses(ExchangeKind.SERVER, workers, 2) as connect,
    ):
        return on_threads(workers, run)


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ((2, 2), (1, 1), {"compress": "int8"}),
        ((1, 1), (2, 2), {}),
        ((2, 1), (2,), {}),
        ((4,), (3, 1), {"compress": "int8"}),
    ],
)
def test_a_job_continues_on_hosts_with_other_numbers_of_workers(
    before: Sequence[int], after: Sequence[int], options: dict[str, Any]
) -> None:
    """Rank 0 alone has the state."""
    whole = train((1,), 4, **options)[0]
    parts = train(before, 2, **options)
    held_back = {name: array for part in parts for name, array in part.held_back.items()}
    begin = Saved(
        iteration=2, values=parts[0].values, histories=parts[0].histories, held_back=held_back
    )
    names = {name.partition(",")[0] for name in held_back}
    assert names <= {f"w{number}" for number in range(len(SHAPES))}
    for end in train(after, 4, begin=begin, **options):
        for value, expected in zip(end.values, whole.values, strict=True):
            assert np.array_equal(value, expected)
