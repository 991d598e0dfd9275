"""Scripts with local steps: a torch.optim optimizer, or a rule, on each worker's own gradients,
and exchanges once a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions, Outer
from poseidon.torch.update_rules import SGD, Adam
from poseidon.torch.updates.local_optimizer import LocalOptimizerUpdate
from poseidon.torch.updates.worker_optimizer import MeanOptimizerUpdate, WorkerOptimizerUpdate
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import Body, How, together
from tests.support.simulated_device import simulated_devices

STEPS, WORKERS = 8, 3
BY_FLAGS = Membership(
    network=Network(timeout_s=TIMEOUT_S),
    options=ExchangeOptions(
        kind=ExchangeKind.HYBRID, local_steps=3, outer_lr=0.5, outer_momentum=0.8
    ),
)
OUTER = Outer(lr=0.5, momentum=0.8)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.05),
}


class Net(nn.Sequential):
    """Layers with running statistics between them.

    Rank 0's first values count. A bias before them would have noise as gradients.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        weights = torch.Generator().manual_seed(rank)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.5, 0.5, generator=weights)


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(6, 3, generator=data), torch.randn(6, 2, generator=data)
    return nn.functional.mse_loss(net(x), y)


def trains(
    steps: int = STEPS, at: Callable[[nn.Module, Group], None] = lambda net, group: None
) -> Body:
    def body(net: nn.Module, group: Group) -> None:
        while group.steps < steps:
            net.zero_grad()
            loss_of(net, group.steps, group.rank).backward()
            group.step()
            at(net, group)

    return body


def simulated(
    make: Callable[[nn.Module], torch.optim.Optimizer], *, clip: float | None = None
) -> Net:
    """All workers one after the other, rounds of three steps, the outer rule in float64."""
    nets = [Net(0) for _ in range(WORKERS)]
    optimizers = [make(net) for net in nets]
    anchors = {name: value.double() for name, value in nets[0].state_dict().items()}
    momenta = {name: torch.zeros_like(anchor) for name, anchor in anchors.items()}
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            net.zero_grad()
            loss_of(net, step, rank).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        if (step + 1) % 3 and step + 1 < STEPS:
            continue
        for name, anchor in anchors.items():
            mean = torch.stack([net.state_dict()[name].double() for net in nets]).mean(0)
            if "running" in name or "tracked" in name:
                anchor.copy_(mean)
                continue
            gradient = anchor - mean
            momenta[name].mul_(OUTER.momentum).add_(gradient)
            anchor.sub_(OUTER.lr * (gradient + OUTER.momentum * momenta[name]))
        for net in nets:
            net.load_state_dict(anchors)
    return nets[0]


def assert_same(ends: list[dict[str, Tensor]], expected: nn.Module) -> None:
    for end in ends[1:]:
        assert all(torch.equal(ends[0][name], value) for name, value in end.items())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_trains_as_in_the_simulation(name: str) -> None:
    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, LocalOptimizerUpdate)
        trains()(net, group)

    how = OPTIMIZERS[name]
    options = DistributeOptions(local_steps=3, outer=OUTER)
    assert_same(together(WORKERS, Net, how, body, options=options), simulated(how))
    assert_same(together(WORKERS, Net, how, body, member=BY_FLAGS), simulated(how))


def test_a_step_at_the_end_of_a_round_returns_with_the_values_of_all() -> None:
    seen: dict[int, list[Tensor]] = {}

    def look(net: nn.Module, group: Group) -> None:
        seen.setdefault(group.rank, []).append(
            net.get_submodule("3").get_parameter("weight").detach().clone()
        )

    together(2, Net, OPTIMIZERS["sgd"], trains(at=look), member=BY_FLAGS)
    equal = [torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True)]
    assert equal == [False, False, True, False, False, True, False, False]


def test_the_argument_takes_the_place_of_the_flag() -> None:
    def body(net: nn.Module, group: Group) -> None:
        assert type(group._update) is MeanOptimizerUpdate

    together(
        1, Net, OPTIMIZERS["sgd"], body, member=BY_FLAGS, options=DistributeOptions(local_steps=0)
    )


def test_clip_and_passes_are_for_the_gradients_of_each_worker() -> None:
    how = OPTIMIZERS["sgd"]
    ends = together(
        WORKERS, Net, how, trains(), member=BY_FLAGS, options=DistributeOptions(clip=0.1)
    )
    assert_same(ends, simulated(how, clip=0.1))

    def by_hand(net: nn.Module, group: Group) -> None:
        for step in range(STEPS):
            net.zero_grad()
            for _ in range(2):
                (loss_of(net, step, group.rank) / 2).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            group.step()

    def same_statistics(rank: int) -> Net:
        net = Net(rank)
        # a mean of all batches: the second pass of a step counts as the first
        net[1].momentum = None
        return net

    twice = together(
        WORKERS, same_statistics, how, by_hand, member=BY_FLAGS, options=DistributeOptions(passes=2)
    )
    for name, value in simulated(how, clip=0.1).named_parameters():
        torch.testing.assert_close(twice[0][name], value.detach(), rtol=1e-4, atol=1e-5)


def test_one_plain_step_has_the_bits_of_synchronous_training() -> None:
    def plain(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)

    one = DistributeOptions(local_steps=1, outer=Outer(lr=1.0, momentum=0.0))
    for how in (plain, SGD(lr=0.1)):
        local, synchronous = (together(WORKERS, Net, how, trains(), options=o) for o in (one, None))
        assert all(torch.equal(local[0][name], value) for name, value in synchronous[0].items())


def evaluates(net: nn.Module, group: Group) -> None:
    if group.steps == 4:
        with torch.no_grad():
            net(torch.zeros(2, 3))
        group.settle()
        assert len(set(group._loop.exchanged.exchange.control.all_gather(_bytes(net)))) == 1


def _bytes(net: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


STREAMS = replace(
    BY_FLAGS, options=replace(BY_FLAGS.options, sync_fragments=2, sync_delay=1, sync_mix=0.25)
)


@pytest.mark.parametrize("how", [OPTIMIZERS["adamw"], SGD(lr=0.1, momentum=0.9)])
def test_fragments_come_by_flags_and_by_arguments(how: How) -> None:
    outer = Outer(lr=0.5, momentum=0.8, fragments=2, delay=1, mix=0.25)
    options = DistributeOptions(local_steps=3, outer=outer)
    ends = [
        together(WORKERS, Net, how, trains(at=evaluates), member=STREAMS),
        together(WORKERS, Net, how, trains(at=evaluates), options=options),
    ]
    plain = together(WORKERS, Net, how, trains(at=evaluates), member=BY_FLAGS)
    for name, value in ends[0][0].items():
        assert all(torch.equal(end[name], value) for end in (*ends[0], *ends[1]))
    assert not torch.equal(ends[0][0]["0.weight"], plain[0]["0.weight"])


@pytest.mark.parametrize(
    ("how", "member", "saved"),
    [
        (OPTIMIZERS["sgd"], BY_FLAGS, 3),
        (OPTIMIZERS["adamw"], STREAMS, 5),
        (SGD(lr=0.1, momentum=0.9), STREAMS, 6),
        (Adam(lr=0.01), BY_FLAGS, 5),
        (OPTIMIZERS["adamw"], BY_FLAGS, 6),
    ],
)
def test_a_resumed_run_has_the_bits_of_the_whole_one(
    how: How, member: Membership, saved: int, tmp_path: Path
) -> None:
    def save(net: nn.Module, group: Group) -> None:
        if group.steps == saved:
            group.save(tmp_path / "net")

    def resume(net: nn.Module, group: Group) -> None:
        assert group.resume(tmp_path / "net")
        assert group.steps == saved
        trains(10)(net, group)

    whole = together(WORKERS, Net, how, trains(10, save), member=member)
    resumed = together(WORKERS, Net, how, resume, member=member)
    for end in resumed:
        for name, value in end.items():
            assert torch.equal(value, whole[0][name]), name
    synchronous = together(WORKERS, Net, how, resume)  # as any checkpoint
    assert all(torch.equal(synchronous[0][name], value) for name, value in synchronous[1].items())


def test_local_steps_go_on_from_a_synchronous_checkpoint(tmp_path: Path) -> None:
    def save(net: nn.Module, group: Group) -> None:
        if group.steps == 4:
            group.save(tmp_path / "net")

    def resume(net: nn.Module, group: Group) -> None:
        assert group.resume(tmp_path / "net")
        trains()(net, group)

    for how in (OPTIMIZERS["adamw"], SGD(lr=0.1, momentum=0.9)):
        together(2, Net, how, trains(5, save))
        ends = together(2, Net, how, resume, member=BY_FLAGS)
        assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


@pytest.mark.parametrize("how", [OPTIMIZERS["sgd"], SGD(lr=0.1, momentum=0.9)])
def test_settle_ends_a_round_also_after_an_evaluation(how: How) -> None:
    ends = together(2, Net, how, trains(at=evaluates), member=BY_FLAGS)
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def settles_in_a_step(net: nn.Module, group: Group) -> None:
    loss_of(net, 0, group.rank)
    group.settle()


def scales(net: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        net.zero_grad()
        scaler.scale(loss_of(net, step, group.rank) * float("inf")).backward()
        scaler.step(group._update.optimizer)  # is left out on this worker
        scaler.update()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (settles_in_a_step, r"settle\(\) comes after a forward pass of the next step"),
        (scales, r"backward\(\) has run more than 1 time\(s\) without step\(\)"),
        (lambda net, group: group.average_gradients(), "without a backward pass before it"),
        (lambda net, group: group.step(), "without a backward pass before it"),
    ],
)
def test_what_cannot_be_is_refused(body: Body, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        together(1, Net, OPTIMIZERS["sgd"], body, options=DistributeOptions(local_steps=3))


def test_a_grad_scaler_that_looks_within_a_fused_step_is_refused() -> None:
    def fused(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    with pytest.raises(UsageError, match="a GradScaler may skip a step on one worker"):
        together(1, Net, fused, scales, options=DistributeOptions(local_steps=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_steps": -1}, "local_steps is -1; expected 1 or more, 0 for none"),
        ({"outer": Outer()}, "outer= needs local steps; give local_steps=H too"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        together(1, Net, OPTIMIZERS["sgd"], trains(), options=DistributeOptions(**arguments))


def test_a_script_of_a_synchronous_job_needs_no_change() -> None:
    """It calls `average_gradients` before it limits them."""

    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        for step in range(STEPS):
            net.zero_grad()
            loss_of(net, step, group.rank).backward()
            group.average_gradients()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            group._update.optimizer.step()

    how = OPTIMIZERS["sgd"]
    assert_same(together(WORKERS, Net, how, body, member=BY_FLAGS), simulated(how, clip=0.1))


def test_an_optimizer_trains_with_rounds_that_are_stale(tmp_path: Path) -> None:
    stale = replace(BY_FLAGS, options=replace(BY_FLAGS.options, staleness=1))

    def save(net: nn.Module, group: Group) -> None:
        if group.steps == 6:
            group.save(tmp_path / "net")

    def resume(net: nn.Module, group: Group) -> None:
        assert group.resume(tmp_path / "net")
        trains(12)(net, group)

    for how in (OPTIMIZERS["adamw"], SGD(lr=0.1, momentum=0.9)):
        for body in (trains(9, save), resume):
            ends = together(WORKERS, Net, how, body, member=stale)
            for end in ends[1:]:
                for name, value in end.items():
                    torch.testing.assert_close(value, ends[0][name], rtol=1e-5, atol=1e-6)


def test_a_limit_on_the_norm_waits_for_no_device() -> None:
    ends = []
    with simulated_devices(1, 5) as (device,):
        for where in (torch.device("cpu"), device.torch):
            net = nn.Linear(3, 2)
            nn.init.constant_(net.weight, 0.25)
            nn.init.constant_(net.bias, 0.5)
            net.to(where)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            context = WorkerContext(device=where)
            options = DistributeOptions(local_steps=3, outer=OUTER, clip=0.1)
            x = torch.linspace(-1, 1, 12).view(4, 3).to(where)
            with join(net, optimizer, options, context) as group:
                assert isinstance(group._update, LocalOptimizerUpdate)
                for _ in range(2):
                    device.waits.clear()
                    net.zero_grad()
                    net(x).square().sum().backward()
                    group.step()
                    assert not device.waits
            ends.append([value.detach().cpu() for value in net.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)
