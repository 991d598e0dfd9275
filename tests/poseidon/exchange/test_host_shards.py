"""Two machines of two workers, each of which has shards of its own."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from poseidon.exchange.base import ExchangeSettings, Trained
from poseidon.exchange.build import build_exchange
from poseidon.exchange.exchange import Connect
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from ps_server import Rule, RuleKind, SignalKind
from tests.support.cluster import job_addresses
from tests.support.machines import member_on
from tests.support.sampling import sample_of_pairs
from tests.support.threads import on_threads

LOCAL, STEPS = 2, 7
SHAPES = [{"w": (3, 2), "big": (90, 100), "b": (1,)}, {"w": (1, 2), "big": (80, 100)}]
"""Of the tensors of each plane."""


def shards(plane: int, device: str = "meta") -> list[Trained]:
    return [
        Trained(name=name, tensor=torch.ones(shape, device=device), rule=Rule(kind=RuleKind.MEAN))
        for name, shape in SHAPES[plane].items()
    ]


def gradient(rank: int, step: int, like: Tensor) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(like.shape, generator=seed)


@pytest.mark.parametrize(
    ("kind", "clip", "machines"),
    sample_of_pairs(
        [ExchangeKind.SERVER, ExchangeKind.ALLREDUCE, ExchangeKind.AUTO], [None, 0.5], [1, 2]
    ),
)
def test_each_plane_has_its_means_and_all_workers_stop_together(
    kind: ExchangeKind, clip: float | None, machines: int
) -> None:
    size = machines * LOCAL
    options = ExchangeOptions(kind=kind)
    count = 0 if kind is ExchangeKind.ALLREDUCE or machines == 1 else 2

    def worker(rank: int, connect: Connect) -> tuple[list[list[Tensor]], int]:
        member = member_on(rank, [LOCAL] * machines, folder, shards=count, options=options)
        own = shards(rank % LOCAL, "cpu")
        built = build_exchange(
            own,
            ExchangeSettings(clip=clip),
            member,
            connect,
            shards=[shards(plane) for plane in range(LOCAL)],
        )
        exchange, stopped = built.exchange, 0
        exchange.open(None)
        found = []
        for step in range(STEPS):
            exchange.start(step, 0.0)
            for index in reversed(range(len(own))):
                exchange.wait(index)
                exchange.begin(index, gradient(rank, step, own[index].tensor))
            if rank == 0 and step == 1:
                exchange.control.request(SignalKind.STOP)
            exchange.finish()
            if not stopped and exchange.control.is_asked_to_stop(step + 1):
                stopped = step + 1
            for index in range(len(own)):
                exchange.wait(index)
            found.append([trained.tensor.clone() for trained in own])
        exchange.close()
        return found, stopped

    with TemporaryDirectory(prefix="p") as folder, job_addresses(kind, size, count) as connect:
        ends = on_threads(size, lambda rank: worker(rank, connect.of(rank)))
    assert len({stopped for _, stopped in ends}) == 1 and 2 < ends[0][1] <= STEPS
    for step in range(STEPS):
        means = [
            [
                torch.stack(
                    [gradient(rank, step, trained.tensor) for rank in range(plane, size, LOCAL)]
                ).mean(0)
                for trained in shards(plane)
            ]
            for plane in range(LOCAL)
        ]
        norm = torch.cat([mean.flatten() for plane in means for mean in plane]).norm()
        factor = 1.0 if clip is None else min(1.0, clip / float(norm))
        for rank, (found, _) in enumerate(ends):
            for value, mean in zip(found[step], means[rank % LOCAL], strict=True):
                torch.testing.assert_close(value, mean * factor)


def test_each_plane_has_the_outer_momentum_of_late_rounds() -> None:
    """What a plane's first worker sees of the other host's changes in a round depends on when they
    come, so planes may differ; the workers of one do not.
    """
    options = ExchangeOptions(
        kind=ExchangeKind.SERVER, staleness=1, local_steps=2, outer_momentum=0.9
    )

    def own(device: str) -> list[Trained]:
        return [Trained(name="w", tensor=torch.zeros(3, device=device), rule=Rule())]

    def worker(rank: int, connect: Connect) -> list[Tensor]:
        member = member_on(rank, [LOCAL] * 2, folder, shards=2, options=options)
        tensors, planes = own("cpu"), [own("meta") for _ in range(LOCAL)]
        built = build_exchange(tensors, ExchangeSettings(), member, connect, shards=planes)
        exchange, found = built.exchange, []
        exchange.open(None)
        for step in range(8):
            exchange.start(step, 0.1)
            exchange.wait(0)
            exchange.begin(0, torch.full((3,), 1.0 + rank // LOCAL))
            exchange.finish()
            if step % 2:
                exchange.settle()
                exchange.wait(0)
                found.append(tensors[0].tensor.clone())
        exchange.close()
        return found

    with (
        TemporaryDirectory(prefix="p") as folder,
        job_addresses(ExchangeKind.SERVER, 2 * LOCAL, 2) as connect,
    ):
        ends = on_threads(2 * LOCAL, lambda rank: worker(rank, connect.of(rank)))
    for first, other in zip(ends[:LOCAL], ends[LOCAL:], strict=True):
        assert all(map(torch.equal, first, other))
        without = 4 * options.outer_lr * 2 * 0.1 * 1.5  # rounds, steps, rate, mean gradient
        assert float(first[-1].abs().max()) > 1.2 * without
