"""Workers on threads that train one torch module together, for comparison with one process with
the whole batch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from poseidon.base.call_names import LoopPosition
from poseidon.engine.snapshot_files import WrittenSnapshot
from poseidon.engine.worker_context import LoopJob, WorkerContext
from poseidon.exchange.exchange import Built, Exchange
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch import factor_rows
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD, Adam, ParameterGroup, UpdateRule
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S, TOKEN, Addresses, job_addresses
from tests.support.threads import failures_on_threads

How = UpdateRule | Callable[[nn.Module], torch.optim.Optimizer | list[torch.optim.Optimizer]]
Body = Callable[[nn.Module, Group], None]


class RecordingJob(LoopJob):
    """A job that keeps what its loops tell it."""

    def __init__(self) -> None:
        self.positions: list[LoopPosition] = []
        self.exchanges: list[Exchange] = []
        self.written: list[WrittenSnapshot] = []
        self.said: list[str] = []

    def progressed(self, position: LoopPosition) -> None:
        self.positions.append(position)

    def opened(self, built: Built) -> None:
        self.exchanges.append(built.exchange)

    def saved(self, written: WrittenSnapshot) -> None:
        self.written.append(written)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def worker_contexts(
    workers: int, connect: Addresses, member: Membership, *, shards: int, folder: Path | None = None
) -> list[WorkerContext]:
    """Return the context of each worker; `folder` is the job's."""
    return [
        WorkerContext(
            member=replace(
                member,
                network=replace(member.network, rank=rank, size=workers, token=TOKEN),
                shards=shards,
            ),
            connect=connect.of(rank),
            folder=folder,
        )
        for rank in range(workers)
    ]


def together(
    workers: int,
    build: Callable[[int], nn.Module],
    how: How,
    body: Body,
    *,
    options: DistributeOptions | None = None,
    member: Membership | None = None,
    shards: int = 2,
) -> list[dict[str, Tensor]]:
    """Run `body(module, group)` on a thread per worker.

    Return the `state_dict` of each. One worker trains without shards.

    Args:
        workers: number of workers.
        build: makes the module of a rank.
        how: the rule, or a function that makes the optimizer of a module.
        body: the user's loop.
        options: of `distribute`.
        member: what else the exchange is to know.
        shards: number of shards.
    """
    ends: list[dict[str, Tensor] | None] = [None] * workers

    def run(rank: int, context: WorkerContext) -> None:
        module = build(rank)
        with join(module, _how(how, module), options or DistributeOptions(), context) as group:
            body(module, group)
            group.settle()
            ends[rank] = copy.deepcopy(module.state_dict())

    failures = failures_of(workers, run, member=member, shards=shards)
    if failures:
        raise failures[0]
    return [end for end in ends if end is not None]


def failures_of(
    workers: int,
    run: Callable[[int, WorkerContext], object],
    *,
    member: Membership | None = None,
    shards: int = 2,
    on_progress: Callable[[int, LoopPosition], None] = lambda *_: None,
) -> list[BaseException]:
    """Run a function on a thread per worker. Return what was raised, the first to end first.

    Args:
        workers: number of workers.
        run: takes a rank and its context.
        member: what else the exchange is to know.
        shards: number of shards.
        on_progress: takes a rank and the position that it reports.
    """
    run_example = factor_rows._run

    def run_example_alone(module: nn.Module, example: factor_rows.Example) -> None:
        # Two threads that read and write torch's generator at the same time may wait for each
        # other's lock and the GIL; workers are processes.
        with BUILDING:
            run_example(module, example)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(factor_rows, "_run", run_example_alone))
        places = [WorkerContext() if member is None else WorkerContext(member=member)]
        if workers > 1:
            member = member or Membership(network=Network(timeout_s=TIMEOUT_S))
            connect = stack.enter_context(job_addresses(member.options.kind, workers, shards))
            places = worker_contexts(workers, connect, member, shards=shards)
        for rank, place in enumerate(places):
            place.job.progressed = partial(on_progress, rank)  # type: ignore[method-assign]
        return failures_on_threads(len(places), lambda rank: run(rank, places[rank]))


def _how(
    how: How, module: nn.Module
) -> UpdateRule | torch.optim.Optimizer | list[torch.optim.Optimizer]:
    return how if isinstance(how, UpdateRule) else how(module)


BATCH = 12
STEPS = 6


class Net(nn.Module):
    """Convolution, attention whose inner layer is never called, a layer used twice, one used
    never, a tied weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.wide = nn.Linear(24, 10)
        self.twice = nn.Linear(10, 10, bias=False)
        self.idle = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(10))
        self.last = nn.Linear(10, 4)
        self.tied = nn.Linear(10, 10, bias=False)
        self.tied.weight = self.twice.weight
        self.register_buffer("frequencies", torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, x_NCT: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x_NCT)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.wide(x.flatten(1))) * self.scale
        x = torch.tanh(self.twice(self.twice(x)) + self.tied(x))
        result: Tensor = self.last(x)
        return result


BUILDING = threading.Lock()


def build(rank: int) -> Net:
    """Each rank begins with values of its own; rank 0's are the ones that count."""
    with BUILDING, torch.random.fork_rng():  # the seed is the process's
        torch.manual_seed(rank)
        return Net()


def batches(passes: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    data = torch.Generator().manual_seed(5)
    return [
        [
            (torch.randn(BATCH, 3, 5, generator=data), torch.randn(BATCH, 4, generator=data))
            for _ in range(passes)
        ]
        for _ in range(STEPS)
    ]


def loop(passes: int = 1, **zeroing: bool) -> Callable[[nn.Module, Group], None]:
    def body(module: nn.Module, group: Group) -> None:
        for step in batches(passes):
            module.zero_grad(**zeroing)
            for x, y in step:
                own = slice(group.rank, None, group.size)
                (nn.functional.mse_loss(module(x[own]), y[own]) / passes).backward()
            group.step()

    return body


def assert_same(
    ends: list[dict[str, Tensor]], expected: dict[str, Tensor], rtol: float = 1e-5
) -> None:
    for end in ends[1:]:
        for name, value in ends[0].items():
            assert torch.equal(end[name], value), name
    for name, value in expected.items():
        torch.testing.assert_close(
            ends[0][name], value, rtol=rtol, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


RULES: dict[str, How] = {
    "sgd": SGD(lr=lambda step: 0.2 / (1 + step), momentum=0.9, weight_decay=0.01),
    "adam": Adam(lr=0.01, eps=1e-3),
    "groups": SGD(
        lr=0.1, groups=(ParameterGroup(names="*.bias", lr_factor=2, weight_decay_factor=0),)
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch sgd": lambda net: torch.optim.SGD(
        net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01
    ),
    "torch adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3),
}


def member(kind: ExchangeKind = ExchangeKind.HYBRID, staleness: int = 0) -> Membership:
    return Membership(
        network=Network(timeout_s=TIMEOUT_S),
        options=ExchangeOptions(kind=kind, staleness=staleness),
    )


def example() -> Tensor:
    return torch.ones(BATCH // 2, 3, 5)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def of_batches(
    body: Callable[[nn.Module, Group, Tensor], None],
) -> Callable[[nn.Module, Group], None]:
    def run(module: nn.Module, group: Group) -> None:
        for ((x, _),) in batches():
            body(module, group, x[group.rank :: group.size, :, 0])

    return run


def a_step(module: nn.Module, group: Group, x: Tensor) -> None:
    module.zero_grad()
    module(x).square().mean().backward()
    group.step()


def never(module: nn.Module, group: Group) -> None:
    group.step()
