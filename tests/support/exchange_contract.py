"""The contract of every exchange, as scenarios that each implementation runs.

W replicas of a small net, each with its own part of every batch, must end each iteration with the
weights that one process with the whole batch has: that one has an `AloneCarrier`, which is held to
Caffe's own numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.exchange.base import ExchangeSettings, History, Trained
from poseidon.exchange.exchange import Exchange
from poseidon.exchange.hooks import Hooks
from ps_server import Rule, RuleKind, SignalKind
from ps_server.rules import history_count
from tests.support.exchanges import AloneExchange
from tests.support.threads import on_threads

BATCH = 12
ITERATIONS = 6


class Net(nn.Module):
    """Two layers, one tensor used twice, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(7, 7)
        self.idle = nn.Linear(3, 3)
        self.last = nn.Linear(7, 2)
        # its own: replicas are made on threads at the same time
        weights = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.4, 0.4, generator=weights)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(self.again(x)))
        result: Tensor = self.last(x)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training scenario."""

    rule: Rule = field(default_factory=lambda: Rule(momentum=0.9, decay=0.01))
    clip: float | None = None
    passes: int = 1
    iterations: int = ITERATIONS


Make = Callable[[int, Sequence[Trained], ExchangeSettings], Exchange]
"""(rank, tensors, settings) -> an exchange, not yet opened."""
DeviceOf = Callable[[int], torch.device]
"""The device of each rank."""


def on_cpu(rank: int) -> torch.device:
    return torch.device("cpu")


def rate(iteration: int) -> float:
    return 0.2 / (1 + iteration)


@dataclass(slots=True)
class Saved:
    """The state of replicas after some iterations: the values, and the histories, of each
    replica where they are private.
    """

    iterations: int
    values: list[np.ndarray] = field(default_factory=list)
    histories: dict[int, list[History]] = field(default_factory=dict)


def train(
    make: Make,
    workers: int,
    scenario: Scenario,
    *,
    save: Saved | None = None,
    begin: Saved | None = None,
    device_of: DeviceOf = on_cpu,
) -> list[list[np.ndarray]]:
    """Train W replicas on threads; each one's final weights.

    Args:
        make: makes their exchanges.
        workers: how many.
        scenario: how.
        save: end after so many iterations, and note what there is.
        begin: open as usual, and once more from there.
    """

    def run(rank: int) -> list[np.ndarray]:
        return _train_one(make, rank, workers, scenario, save, begin, device_of(rank))

    return on_threads(workers, run)


def _train_one(
    make: Make,
    rank: int,
    workers: int,
    scenario: Scenario,
    save: Saved | None,
    begin: Saved | None,
    device: torch.device,
) -> list[np.ndarray]:
    net = Net().to(device)
    if rank:  # only rank 0's first values count
        for parameter in net.parameters():
            parameter.data.fill_(rank)
    tensors = [Trained(name=n, tensor=p, rule=scenario.rule) for n, p in net.named_parameters()]
    settings = ExchangeSettings(clip=scenario.clip, gradient_scale=1 / scenario.passes)
    exchange = make(rank, tensors, settings)
    hooks = Hooks([net], tensors, exchange, passes=scenario.passes)
    data = torch.Generator().manual_seed(1)
    read: list[Tensor] = []
    try:
        exchange.open(None)
        if begin is not None:
            for parameter, value in zip(net.parameters(), begin.values, strict=True):
                parameter.data.copy_(
                    torch.from_numpy(value) if rank == 0 else torch.tensor(float(rank))
                )
            exchange.open(begin.histories.get(rank, begin.histories[0]), begin.iterations)
        for iteration in range(scenario.iterations if save is None else save.iterations):
            drawn = torch.randn(scenario.passes, BATCH, 7, generator=data)[:, rank::workers]
            if begin is not None and iteration < begin.iterations:
                continue
            batches = drawn.to(device)
            exchange.start(iteration, rate(iteration))
            _check_read(exchange, tensors, read)
            hooks.start()
            for batch in batches:
                x, y = batch[:, :5], batch[:, 5:]
                nn.functional.mse_loss(net(x), y).backward()
                hooks.next_pass()
            hooks.finish()
            exchange.finish()
            # one replica alone uses the values before it starts the next iteration
            reads = iteration % workers == rank
            read = _read(exchange, tensors) if reads else []
        exchange.settle()
        _check_read(exchange, tensors, read)
        if save is not None and (rank == 0 or exchange.state.private):
            save.histories[rank] = [
                [array.copy() for array in history]
                for history in exchange.state.histories().values()
            ]
        if save is not None and rank == 0:
            save.values = [p.detach().cpu().numpy().copy() for p in net.parameters()]
        parts = exchange.control.all_gather(b"%d" % rank)
        assert parts == tuple(b"%d" % r for r in range(workers))
        return [p.detach().cpu().numpy().copy() for p in net.parameters()]
    finally:
        hooks.close()
        exchange.close()


def _read(exchange: Exchange, tensors: Sequence[Trained]) -> list[Tensor]:
    for index in range(len(tensors)):
        exchange.wait(index)
    return [trained.tensor.detach().clone() for trained in tensors]


def _check_read(exchange: Exchange, tensors: Sequence[Trained], read: Sequence[Tensor]) -> None:
    """Check that values were not from before the last iteration; at staleness > 0 newer ones may
    have come.
    """
    if read and not exchange.state.private:
        for before, now in zip(read, _read(exchange, tensors), strict=True):
            assert torch.equal(before, now)


def reference(scenario: Scenario) -> list[np.ndarray]:
    """Train in one process with the whole batch. Return the weights."""
    (weights,) = train(
        lambda rank, tensors, settings: AloneExchange(tensors, settings), 1, scenario
    )
    return weights


def check_exact(make: Make, workers: int, scenario: Scenario, device_of: DeviceOf = on_cpu) -> None:
    """Check that all replicas end with the same bits, equal to one process's weights up to the
    order of float sums.
    """
    ends = train(make, workers, scenario, device_of=device_of)
    for end in ends[1:]:
        for a, b in zip(ends[0], end, strict=True):
            assert np.array_equal(a, b)
    for a, b in zip(ends[0], reference(scenario), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def check_reopen_without_histories(make: Make, workers: int, device_of: DeviceOf = on_cpu) -> None:
    """Check that an exchange opened again without histories continues from zeros, whatever it was
    opened with.
    """
    rule, shape = Rule(kind=RuleKind.ADAM, momentum=0.9, delta=1e-4), (2, 3)
    found: list[History] = []

    def run(rank: int) -> None:
        device = device_of(rank)
        trained = Trained(name="w", tensor=torch.ones(shape, device=device), rule=rule)
        exchange = make(rank, [trained], ExchangeSettings(start_clock=4))
        exchange.open([[np.full(shape, 7.0, np.float32)] * history_count(rule.kind)])
        trained.tensor.fill_(2.0)
        exchange.open(None, 9)
        exchange.start(9, 0.0)
        exchange.wait(0)
        if 0 in exchange.by_factors:
            exchange.begin_factors(
                0, torch.zeros(4, 2, device=device), torch.zeros(4, 3, device=device)
            )
            exchange.release(0)
        else:
            exchange.begin(0, torch.zeros(shape, device=device))
        exchange.finish()
        exchange.settle()
        assert torch.equal(trained.tensor.cpu(), torch.full(shape, 2.0))
        if rank == 0:
            found.extend(exchange.state.histories().values())
        exchange.close()

    with ThreadPoolExecutor(workers) as pool:
        for running in [pool.submit(run, rank) for rank in range(workers)]:
            running.result()
    assert len(found[0]) >= history_count(rule.kind)
    assert all(np.abs(array).max() == 0.0 for array in found[0])


def check_reopen(
    opened: Callable[[], AbstractContextManager[Make]],
    workers: int,
    scenario: Scenario,
    device_of: DeviceOf = on_cpu,
) -> None:
    """Check that an exchange opened again from a saved state ends with the bits of one that was
    never interrupted.
    """
    saved = Saved(iterations=scenario.iterations // 2)
    with opened() as make:
        whole = train(make, workers, scenario, device_of=device_of)
    with opened() as make:
        train(make, workers, scenario, save=saved, device_of=device_of)
    with opened() as make:
        ends = train(make, workers, scenario, begin=saved, device_of=device_of)
    for end in ends:
        for a, b in zip(end, whole[0], strict=True):
            assert np.array_equal(a, b)
    with opened() as make:
        check_reopen_without_histories(make, workers, device_of)


def check_calls(make: Make, workers: int, device_of: DeviceOf = on_cpu) -> None:
    """Check what `check_exact` does not look at.

    Statistics take their mean, a tensor without a gradient stays, collections are by rank, all
    replicas see a request before the iteration that it names ends, traffic is of tensors of the
    exchange, and a second `close` does nothing.
    """
    seen: dict[int, list[int]] = {}
    iterations = 10

    def run(rank: int) -> None:
        device = device_of(rank)
        first = [torch.ones(2, 3), torch.full((3,), 5.0), torch.zeros(4)]
        own = [tensor.to(device) for tensor in first]
        tensors = [
            Trained(name="w", tensor=own[0], rule=Rule()),
            Trained(name="idle", tensor=own[1], rule=Rule(momentum=0.9)),
            Trained(name="mean", tensor=own[2], rule=Rule(decay=0.5), statistics=True),
        ]
        exchange = make(rank, tensors, ExchangeSettings())
        exchange.open(None)
        seen[rank] = []
        for iteration in range(iterations):
            exchange.start(iteration, 0.25)
            for index in range(3):
                exchange.wait(index)
            tensors[2].tensor.add_(rank + 1.0)
            if 0 in exchange.by_factors:
                u, v = torch.full((1, 2), float(rank)), torch.ones(1, 3)
                exchange.begin_factors(0, u.to(device), v.to(device))
                exchange.release(0)
            else:
                exchange.begin(0, torch.full((2, 3), float(rank)).to(device))
            exchange.finish()
            clocks = [request.clock for request in exchange.control.requests]
            seen[rank] += [clock for clock in clocks if clock == iteration + 1]
            if rank == 0 and iteration == 1:
                exchange.control.request(SignalKind.SNAPSHOT)
        exchange.settle()
        w, idle, mean = (trained.tensor.cpu() for trained in tensors)
        torch.testing.assert_close(w, torch.full((2, 3), 1 - 0.25 * iterations * (workers - 1) / 2))
        assert idle.tolist() == [5.0] * 3
        torch.testing.assert_close(mean, torch.full((4,), iterations * (workers + 1) / 2))
        assert exchange.control.all_gather(b"%d" % rank) == tuple(
            b"%d" % other for other in range(workers)
        )
        assert exchange.traffic().keys() <= {0, 1, 2}
        exchange.close()
        exchange.close()

    with ThreadPoolExecutor(workers) as pool:
        for running in [pool.submit(run, rank) for rank in range(workers)]:
            running.result()
    assert len(seen[0]) == 1
    assert all(clocks == seen[0] for clocks in seen.values())
