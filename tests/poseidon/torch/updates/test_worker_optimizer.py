"""What a script may do to a module that a torch.optim optimizer trains, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.errors import UsageError
from poseidon.exchange.membership import Membership
from poseidon.exchange.options import ExchangeKind, ExchangeOptions
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from poseidon.torch.updates.worker_optimizer import WorkerOptimizerUpdate
from ps_server.network import Network
from tests.poseidon.torch.updates.test_rule import build, build_frozen
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import How, together

FACTORS = Membership(
    network=Network(timeout_s=TIMEOUT_S), options=ExchangeOptions(kind=ExchangeKind.FACTORS)
)
Loop = Callable[[nn.Module, int, Callable[[], object]], None]
"""Trains a module on the records from a number on, every other one where that is 0 or 1; ends
each step with the function.
"""


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def records(rank: int, workers: int) -> Tensor:
    return torch.linspace(-1, 1, 24).view(8, 3)[rank::workers]


def losses(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()  # type: ignore[no-any-return]


def freezes(net: nn.Module, x: Tensor, step: Callable[[], object]) -> None:
    last = net.get_submodule("2")
    for wants in (True, True, False, False, True):
        last.requires_grad_(wants)
        net.zero_grad()
        losses(net, x).backward()
        step()


def attacks(net: nn.Module, x: Tensor, step: Callable[[], object]) -> None:
    for _ in range(3):
        net.zero_grad()
        x = x.detach().requires_grad_()
        (toward,) = torch.autograd.grad(losses(net, x) * len(x), x)
        losses(net, x.detach() + 0.1 * toward).backward()
        step()


def checkpoints(net: nn.Module, x: Tensor, step: Callable[[], object]) -> None:
    assert isinstance(net, nn.Sequential)
    for _ in range(3):
        net.zero_grad()
        torch.utils.checkpoint.checkpoint(
            net, x.requires_grad_(), use_reentrant=False
        ).square().mean().backward()
        step()


@pytest.mark.parametrize("loop", [freezes, attacks, checkpoints])
def test_loops_that_are_not_plain(
    loop: Callable[[nn.Module, Tensor, Callable[[], object]], None],
) -> None:
    alone = build(0)
    loop(alone, records(0, 1), sgd(alone).step)
    ends = together(
        2,
        build,
        sgd,
        lambda net, group: loop(net, records(group.rank, 2), group.step),
        options=DistributeOptions(batch_size=4),
        member=FACTORS,
    )
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(ends[0][name], ends[1][name])


class Lookahead(torch.optim.Optimizer):
    """As it is published: it shares the groups and the state of the optimizer that it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.inner.step()
        parameters = (p for group in self.param_groups for p in group["params"])
        with torch.no_grad():
            for slow, parameter in zip(self.slow, parameters, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


def test_an_optimizer_may_wrap_a_second_one() -> None:
    def trains(net: nn.Module, x: Tensor, step: Callable[[], object]) -> None:
        for _ in range(3):
            net.zero_grad()
            losses(net, x).backward()
            step()

    alone = build(0)
    trains(alone, records(0, 1), Lookahead(sgd(alone)).step)
    ends = together(
        2,
        build,
        lambda net: Lookahead(sgd(net)),
        lambda net, group: trains(net, records(group.rank, 2), group.step),
    )
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-5, atol=1e-6)


def test_a_hook_on_a_weight_keeps_it_from_travelling_as_factors() -> None:
    seen: list[Tensor] = []

    def hooked(rank: int) -> nn.Module:
        net = build(rank)
        net[0].weight.register_hook(seen.append)  # type: ignore[union-attr, arg-type]
        return net

    def body(net: nn.Module, group: Group) -> None:
        losses(net, records(group.rank, 2)).backward()
        group.step()

    together(2, hooked, sgd, body, options=DistributeOptions(batch_size=4), member=FACTORS)
    assert [gradient.shape for gradient in seen] == [(4, 3), (4, 3)]


def of_first(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.get_submodule("0").parameters(), lr=0.1)


def trains(net: nn.Module, group: Group) -> None:
    for _ in range(2):
        net.zero_grad()
        losses(net, records(0, 1)).backward()
        group.step()


def adds_a_group(net: nn.Module, group: Group) -> None:
    assert isinstance(group._update, WorkerOptimizerUpdate)
    group._update.optimizer.add_param_group({"params": list(net.get_submodule("2").parameters())})
    trains(net, group)


def has_a_second_one(net: nn.Module, group: Group) -> None:
    second = torch.optim.SGD(net.get_submodule("2").parameters(), lr=0.1)
    losses(net, records(0, 1)).backward()
    second.step()
    group.step()


def thaws(net: nn.Module, group: Group) -> None:
    net.requires_grad_(True)
    trains(net, group)


@pytest.mark.parametrize(
    ("start", "how", "body"),
    [
        (build, of_first, adds_a_group),
        (build, of_first, has_a_second_one),
        (build_frozen, sgd, thaws),
    ],
)
def test_parameters_that_each_worker_would_train_by_itself_are_refused(
    start: Callable[[int], nn.Module],
    how: Callable[[nn.Module], torch.optim.Optimizer],
    body: Callable[[nn.Module, Group], None],
) -> None:
    with pytest.raises(UsageError, match=r"'2\.weight' is trained"):
        together(1, start, how, body)


def test_a_step_is_left_out_after_the_gradients_were_looked_at() -> None:
    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        for place in range(3):
            net.zero_grad()
            losses(net, records(group.rank, 2)).backward()
            if place == 1:
                group.average_gradients()
            else:
                group.step()
            assert group.steps == (1, 1, 2)[place]

    first, second = together(2, build, sgd, body, member=FACTORS)
    for name, value in first.items():
        assert torch.equal(value, second[name])


def test_average_gradients_finishes_no_step() -> None:
    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        for place in range(3):
            losses(net, records(group.rank, 2)).backward()
            group.average_gradients()
            assert group.steps == place
            group.step()
            assert group.steps == place + 1

    together(2, build, sgd, body, member=FACTORS)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("averages", [False, True])
def test_a_grad_scaler_looks_at_means_or_is_refused(fused: bool, averages: bool) -> None:
    """Its own look at one worker's gradients would train with a scale, or skip a step on that
    worker only.
    """

    def body(net: nn.Module, group: Group) -> None:
        assert isinstance(group._update, WorkerOptimizerUpdate)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(3):
            net.zero_grad()
            loss = losses(net, records(group.rank, 2))
            if (step, group.rank) == (1, 0):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if averages:
                group.average_gradients()
            scaler.step(group._update.optimizer)
            scaler.update()

    def how(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)

    if averages:
        first, second = together(2, build, how, body, member=FACTORS)
        for name, value in first.items():
            assert torch.equal(value, second[name])
            assert value.isfinite().all()
    else:
        with pytest.raises(UsageError, match=r"call average_gradients\(\)"):
            together(2, build, how, body, member=FACTORS)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("how", [sgd, SGD(lr=0.1)])
def test_gradients_that_are_clipped_after_they_were_sent_name_clip(how: How, scales: bool) -> None:
    """Also behind a GradScaler's `unscale_`."""

    def body(net: nn.Module, group: Group) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=scales)
        scaler.scale(losses(net, records(0, 1))).backward()
        if isinstance(group._update, WorkerOptimizerUpdate):
            scaler.unscale_(group._update.optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        group.step()

    words = r"'0\.weight' was changed .* by clip_grad_norm_; use clip= of distribute\(\)"
    with pytest.raises(UsageError, match=words):
        together(1, build, how, body)


def test_means_of_different_shapes_are_refused() -> None:
    def body(net: nn.Module, group: Group) -> None:
        group.mean(torch.ones(2 + group.rank))

    with pytest.raises(
        UsageError, match=r"worker 0 gives mean\(\) 2 numbers, but worker 1 gives 3"
    ):
        together(2, build, sgd, body, member=FACTORS)


class Either(nn.Module):
    """Uses one of two weights, neither of which shares a table."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2048), nn.Linear(3, 2048)

    def forward(self, x: Tensor, which: int) -> Tensor:
        result: Tensor = self.one(x) if which else self.other(x)
        return result


@pytest.fixture
def default_dtype() -> Iterator[torch.dtype]:
    """Another one than the library's own memory has."""
    torch.set_default_dtype(torch.float64)
    yield torch.float64
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("how", [sgd, SGD(lr=0.1)])
def test_a_script_may_have_another_default_dtype(default_dtype: torch.dtype, how: How) -> None:
    kind = ExchangeKind.ALLREDUCE if isinstance(how, SGD) else ExchangeKind.SERVER

    def body(net: nn.Module, group: Group) -> None:
        x = torch.ones(2, 3, dtype=torch.float32)
        for _ in range(2):
            net.zero_grad()
            net(x, group.rank).square().mean().backward()
            group.step()

    member = Membership(network=Network(timeout_s=TIMEOUT_S), options=ExchangeOptions(kind=kind))
    first, second = together(2, lambda _: Either().float(), how, body, member=member)
    for name, value in first.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, second[name])


def test_gradients_have_the_order_in_memory_of_their_parameters() -> None:
    """A fused optimizer takes all its tensors to have one order."""
    net = nn.Linear(3, 2)
    net.weight = nn.Parameter(net.weight.detach().t().contiguous().t())
    alone = copy.deepcopy(net)
    assert net.weight.stride() == alone.weight.stride() == (1, 2)
    how = torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    expected = torch.optim.Adam(alone.parameters(), lr=0.1, fused=True)
    with poseidon.distribute(net, how) as group:
        for _ in range(3):
            losses(net, records(0, 1)).backward()
            group.step()
            losses(alone, records(0, 1)).backward()
            expected.step()
            expected.zero_grad()
    torch.testing.assert_close(net.weight, alone.weight)
