"""Optimizers of torch whose rules the shards apply: the optimizers get the same weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from poseidon.engine.worker_context import WorkerContext
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.factors.carrier import FactorCarrier
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.exchange.server.carrier import ServerCarrier
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions, RunsOn
from poseidon.torch.updates.optimizer import ShardOptimizerUpdate
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server.network import Network
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import How, failures_of, together

Optimizers = list[torch.optim.Optimizer]
ON_SHARDS = DistributeOptions(on=RunsOn.SHARDS)
STEPS = 7
BOTH = {ServerCarrier, FactorCarrier}
KINDS = [kind for kind in ExchangeKind if kind is not ExchangeKind.LOCAL]


def build(_: int = 0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 3))
    with torch.no_grad():
        for place, parameter in enumerate(net.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).mul(7 + place).sin()
            parameter.copy_(values.view(parameter.shape) / 3)
    return net


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed},
        {"params": others, "weight_decay": 0.0, "lr": 0.02, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.1, nesterov=False)


def muon(net: nn.Module) -> Optimizers:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def muon_alone(net: nn.Module) -> Optimizers:
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    return [torch.optim.Muon([p for p in net.parameters() if p.requires_grad], lr=0.02)]


def losses(net: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """The loss of this worker's part of a batch of 6."""
    x = torch.linspace(-2, 2, 30).add(step).sin().view(6, 5)
    y = torch.linspace(-1, 1, 18).mul(3 + step).cos().view(6, 3)
    return nn.functional.mse_loss(net(x[rank::size]), y[rank::size])


def ordinary_loop(
    optimizers: Optimizers, net: nn.Module, backward: Callable[[int], object]
) -> None:
    """A loop as for one process, whose groups' rates do not keep their ratio."""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=0.005)
        for o in optimizers
    ]
    for step in range(STEPS):
        backward(step)
        for one in optimizers:
            one.step()
            one.zero_grad()
        for scheduler in schedulers:
            scheduler.step()


def alone(how: Callable[[nn.Module], torch.optim.Optimizer | Optimizers]) -> dict[str, Tensor]:
    """The values of torch in one process, with the mean gradient as a shard adds it up."""
    net = build()
    made = how(net)

    def backward(step: int) -> None:
        for rank in range(3):
            losses(net, step, rank, 3).backward()
        for parameter in net.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                parameter.grad /= 3

    ordinary_loop(made if isinstance(made, list) else [made], net, backward)
    return dict(net.state_dict())


def train(
    how: How, *, options: DistributeOptions = ON_SHARDS, member: Membership | None = None
) -> list[dict[str, Tensor]]:
    """The same loop on three workers."""

    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, ShardOptimizerUpdate)
        ordinary_loop(
            list(group._update.optimizers),
            net,
            lambda step: losses(net, step, group.rank, group.size).backward(),
        )
        assert group.steps == STEPS
        assert not any(one.state for one in group._update.optimizers)
        assert all(p.grad is None for p in net.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that misses a step
        return together(3, build, how, body, options=options, member=member)


def of_kind(kind: ExchangeKind, **options: object) -> Membership:
    exchange = replace(ExchangeOptions(kind=kind), **options)  # type: ignore[arg-type]
    return Membership(network=Network(timeout_s=TIMEOUT_S), options=exchange)


def assert_close(
    ends: list[dict[str, Tensor]], expected: dict[str, Tensor], limit: float = 1e-6
) -> None:
    for name, value in expected.items():
        assert torch.equal(ends[0][name], ends[1][name]) and torch.equal(
            ends[0][name], ends[2][name]
        )
        difference = float((ends[0][name] - value).abs().max() / value.abs().max())
        assert difference <= limit, (name, difference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [sgd, adamw])
def test_an_ordinary_loop_on_three_workers_is_torchs(
    how: Callable[[nn.Module], torch.optim.Optimizer], kind: ExchangeKind
) -> None:
    """Sums are added in another order by all-reduce and of factors."""
    limit = 1e-6 if kind is ExchangeKind.SERVER else 3e-6
    options = replace(ON_SHARDS, batch_size=2)
    assert_close(train(how, options=options, member=of_kind(kind)), alone(how), limit)


@pytest.mark.parametrize(
    ("kind", "carriers"), [(ExchangeKind.AUTO, {ServerCarrier}), (ExchangeKind.HYBRID, BOTH)]
)
def test_unless_the_job_names_an_exchange_all_gradients_go_to_the_shards(
    kind: ExchangeKind, carriers: set[type]
) -> None:
    """Workers that apply the rule to factors keep its state."""

    def body(net: nn.Module, group: Group) -> None:
        assert {type(carrier) for carrier in group._loop.exchanged.exchange.carriers} == carriers
        assert bool(group._loop.exchanged.exchange.by_factors) == (kind is ExchangeKind.HYBRID)
        losses(net, 0, group.rank, group.size).backward()
        group.step()

    options = replace(ON_SHARDS, batch_size=2)
    together(3, build, adamw, body, options=options, member=of_kind(kind))


class WithEmpty(nn.Linear):
    """A layer with a parameter of no elements, as of an adapter of rank 0."""

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_without_elements_has_nothing_to_train(workers: int) -> None:
    def body(net: nn.Module, group: Group) -> None:
        for _ in range(3):
            net(torch.ones(2, 5)).sum().backward()
            group.step()
            assert all(parameter.grad is None for parameter in net.parameters())

    ends = together(workers, lambda _: WithEmpty(), sgd, body, options=ON_SHARDS)
    assert [end["empty"].shape for end in ends] == [(0, 3)] * workers


def test_muon_is_torchs() -> None:
    member = of_kind(ExchangeKind.SERVER)
    assert_close(train(muon_alone, member=member), alone(muon_alone))


@pytest.mark.parametrize(
    "kind", [ExchangeKind.SERVER, ExchangeKind.FACTORS, ExchangeKind.ALLREDUCE]
)
def test_muon_beside_adamw_is_torchs(kind: ExchangeKind) -> None:
    """AdamW may differ in the last bit of a value, and so do the gradients of the next step. In
    bfloat16 such a bit moves small singular values.
    """
    options = replace(ON_SHARDS, batch_size=2)
    assert_close(train(muon, options=options, member=of_kind(kind)), alone(muon), 0.1)


@pytest.mark.parametrize("how", [sgd, adamw])
def test_a_limit_of_the_norm_is_that_of_workers(
    how: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    limited = replace(ON_SHARDS, clip=0.05)

    def on_workers(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        ordinary_loop(
            [group._update.optimizer], net, lambda step: losses(net, step, group.rank, 3).backward()
        )

    expected = together(3, build, how, on_workers, options=replace(limited, on=RunsOn.WORKERS))
    assert_close(train(how, options=limited), expected[0], 1e-6)


@pytest.mark.parametrize(
    ("given", "options", "limit"),
    [
        ({"compress": "int8"}, {}, 0.1),
        ({"compress": "powersgd:4"}, {}, 0.1),
        ({}, {"staleness": 1}, math.inf),  # what a worker sees depends on the order of arrival
        ({"local_steps": 2}, {}, 0.45),
    ],
)
@pytest.mark.parametrize("how", [adamw, muon])
def test_what_rules_work_with(
    how: How, given: dict[str, object], options: dict[str, object], limit: float
) -> None:
    """All workers end with equal values, near the plain exchange's where they are certain."""
    ends = train(
        how,
        options=replace(ON_SHARDS, **given),  # type: ignore[arg-type]
        member=of_kind(ExchangeKind.SERVER, **options),
    )
    assert_close(ends, alone(how), limit)  # type: ignore[arg-type]


def test_passes_add_up() -> None:
    def body(net: nn.Module, group: Group) -> None:
        for step in range(4):
            for part in range(2):
                (losses(net, step, 2 * group.rank + part, 6) / 2).backward()
            group.step()

    def whole(net: nn.Module, group: Group) -> None:
        for step in range(4):
            losses(net, step, 0, 1).backward()
            group.step()

    ends = together(3, build, adamw, body, options=replace(ON_SHARDS, passes=2))
    (expected,) = together(1, build, adamw, whole, options=ON_SHARDS)
    assert_close(ends, expected, 3e-6)


def checkpointed(size: int, how: Callable[[nn.Module], Optimizers], cut: int) -> dict[str, Tensor]:
    """Six steps, with a checkpoint of all workers that a second job continues after `cut`."""
    states: list[dict[str, object]] = []
    ends: dict[int, dict[str, Tensor]] = {}

    def run(rank: int, context: WorkerContext) -> None:
        net = build()
        optimizers = how(net)
        with join(net, optimizers, ON_SHARDS, context) as group:
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
            group.keep(first=schedulers[0], second=schedulers[1])
            if states:
                group.load_state_dict(states[-1] if rank == 0 else None)
            for step in range(group.steps, 6 if states or not cut else cut):
                losses(net, step, rank, group.size).backward()
                group.step()
                for scheduler in schedulers:
                    scheduler.step()
            state = group.state_dict()
            if rank == 0:
                states.append(state)
                ends[0] = {name: value.clone() for name, value in net.state_dict().items()}

    for _ in range(2 if cut else 1):
        failures = failures_of(size, run)
        if failures:
            raise failures[0]
    return ends[0]


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_that_is_resumed_has_the_bits_of_one_that_went_on(size: int) -> None:
    whole, resumed = (checkpointed(size, muon, cut) for cut in (0, 4))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_state_of_other_optimizers_is_refused() -> None:
    states = []

    def saves(net: nn.Module, group: Group) -> None:
        states.append(group.state_dict())

    def loads(net: nn.Module, group: Group) -> None:
        group.load_state_dict(states[0])

    together(1, build, sgd, saves, options=ON_SHARDS)
    with pytest.raises(SnapshotError, match=r"was trained with torch\.optim\.SGD on the shards"):
        together(1, build, adamw, loads, options=ON_SHARDS)


Body = Callable[[nn.Module, Group], None]


def backward(net: nn.Module) -> None:
    losses(net, 0, 0, 1).backward()


def too_late(net: nn.Module, group: Group) -> None:
    backward(net)
    group._update.optimizers[0].param_groups[0]["lr"] = 0.5
    group._update.optimizers[0].step()


def without_backward(net: nn.Module, group: Group) -> None:
    backward(net)
    group._update.optimizers[0].step()
    group._update.optimizers[0].step()


def closure(net: nn.Module, group: Group) -> None:
    backward(net)
    group._update.optimizers[0].step(lambda: 0.0)


def scaled(net: nn.Module, group: Group) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(losses(net, 0, 0, 1)).backward()  # type: ignore[no-untyped-call]
    scaler.step(group._update.optimizers[0])


def clipped(net: nn.Module, group: Group) -> None:
    backward(net)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    group.step()


def sets_lr(net: nn.Module, group: Group) -> None:
    assert group.lr == 0.01
    group.lr = 0.5


def thaws(net: nn.Module, group: Group) -> None:
    backward(net)
    group.step()
    extra = nn.Parameter(torch.ones(1))
    group._update.optimizers[0].add_param_group({"params": [extra]})
    backward(net)
    extra.grad = torch.ones(1)
    group.step()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (too_late, r"lr has changed from \(0.01, 0.02\) to \(0.5, 0.02\) since this step's first"),
        (without_backward, r"backward"),
        (closure, r"step\(\) was given a closure"),
        (scaled, r"GradScaler .* to the shards; use bfloat16 autocast"),
        (clipped, r"was changed after backward\(\) had sent it.*use clip= of distribute"),
        (sets_lr, r"group.lr was set to 0.5 .* set lr in the optimizer's param_groups"),
        (thaws, r"has a gradient, but required none, or did not exist"),
        (
            lambda net, group: group.step(zero_grad=False),
            r"step\(zero_grad=False\) cannot be used with torch",
        ),
    ],
)
def test_what_the_shards_cannot_do_is_refused(body: Body, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        together(1, build, adamw, body, options=ON_SHARDS)  # type: ignore[arg-type]


def test_an_evaluation_after_settle_lets_the_rate_change() -> None:
    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, ShardOptimizerUpdate)
        (optimizer,) = group._update.optimizers
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(3):
            losses(net, 0, group.rank, group.size).backward()
            optimizer.step()
            group.settle()
            with torch.no_grad():
                net(torch.ones(1, 5))
            plateau.step(1.0)
        assert group.lr < 0.01

    together(3, build, adamw, body, options=ON_SHARDS)


def test_a_gradient_outside_the_optimizer_is_the_scripts() -> None:
    """Another optimizer may be given a part of the module only."""

    def head(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net[4].parameters())  # type: ignore[index, union-attr]

    def body(net: nn.Module, group: Group) -> None:
        for step in range(2):
            losses(net, step, group.rank, group.size).backward()
            group.step()

    ends = together(3, build, head, body, options=ON_SHARDS)
    start = build().state_dict()
    assert torch.equal(ends[0]["0.weight"], start["0.weight"])
    assert not torch.equal(ends[0]["4.weight"], start["4.weight"])
