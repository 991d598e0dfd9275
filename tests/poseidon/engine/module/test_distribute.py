"""Any torch module on several workers: the weights are those of one process with the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.engine.module.distribute import running_in
from poseidon.engine.module.group import Group
from poseidon.engine.module.optimizer_group import OptimizerGroup
from poseidon.engine.module.rule_group import RuleGroup
from poseidon.engine.module.tensors import Buffers, DistributeOptions
from poseidon.engine.module.update_rules import SGD, Adam, Nesterov, ParameterGroup, UpdateRule
from poseidon.engine.module.worker_context import LoopPosition, WorkerContext
from poseidon.errors import JobError, UsageError
from poseidon.exchange.build import Membership
from poseidon.exchange.cost import ExchangeKind
from poseidon.exchange.options import ExchangeOptions, OnDivergence
from ps_server import PeerLost, ServerError, SignalKind
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import How, together

BATCH = 12
STEPS = 6


class Net(nn.Module):
    """Convolution, attention whose inner layer is never called, a layer used twice, one used never, a tied weight."""

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


def assert_same(ends: list[dict[str, Tensor]], expected: dict[str, Tensor], rtol: float = 1e-5) -> None:
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
    "groups": SGD(lr=0.1, groups=(ParameterGroup(names="*.bias", lr_factor=2, weight_decay_factor=0),)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),
    "torch adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3),
}


KINDS = [kind for kind in ExchangeKind if kind is not ExchangeKind.LOCAL]


def member(kind: ExchangeKind = ExchangeKind.HYBRID, staleness: int = 0) -> Membership:
    return Membership(timeout_s=TIMEOUT_S, options=ExchangeOptions(kind=kind, staleness=staleness))


def example() -> Tensor:
    return torch.ones(BATCH // 2, 3, 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*RULES, *OPTIMIZERS])
def test_two_workers_are_one_process(name: str, kind: ExchangeKind) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    (expected,) = together(1, build, how, loop())
    ends = together(2, build, how, loop(), options=DistributeOptions(example=example()), member=member(kind))
    assert_same(ends, expected)


@pytest.mark.parametrize("name", ["sgd", "torch sgd"])
def test_several_passes_and_a_limit_of_the_norm(name: str) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    limited = DistributeOptions(passes=2, clip=0.05, example=example())
    (expected,) = together(1, build, how, loop(passes=2), options=limited)
    (unlimited,) = together(1, build, how, loop(passes=2), options=DistributeOptions(passes=2))
    ends = together(3, build, how, loop(passes=2), options=limited, member=member())
    assert_same(ends, expected)
    assert not torch.allclose(expected["last.weight"], unlimited["last.weight"], atol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_alone_is_the_optimizer_without_us(name: str) -> None:
    (end,) = together(1, build, OPTIMIZERS[name], loop())
    module = build(0)
    optimizer = OPTIMIZERS[name](module)
    for step in batches():
        optimizer.zero_grad()
        for x, y in step:
            nn.functional.mse_loss(module(x), y).backward()
        for parameter in module.parameters():  # what is used nowhere counts as zero
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(end[name], value), name


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.01), {"momentum": 0.9, "weight_decay": 0.01}),
        (Nesterov(lr=0.1, momentum=0.9), {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_a_rule_at_a_fixed_rate_is_torchs_optimizer(rule: UpdateRule, optimizer: dict[str, Any]) -> None:
    (by_rule,) = together(1, build, rule, loop())
    (by_torch,) = together(
        1, build, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, **optimizer), loop()
    )
    assert_same([by_rule], by_torch)


def test_gradients_may_be_zeroed_in_place() -> None:
    ends = [
        together(2, build, OPTIMIZERS["torch sgd"], loop(set_to_none=where), member=member())[0]
        for where in (True, False)
    ]
    assert_same(ends, ends[0])


def test_the_optimizers_own_step_is_enough() -> None:
    def body(module: nn.Module, group: Group) -> None:
        assert isinstance(group, OptimizerGroup)
        optimizer = group._optimizer
        for ((x, y),) in batches():
            own = slice(group.rank, None, group.size)
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x[own]), y[own]).backward()
            optimizer.step()
        assert group.steps == STEPS

    (expected,) = together(1, build, OPTIMIZERS["torch sgd"], loop())
    assert_same(together(2, build, OPTIMIZERS["torch sgd"], body, member=member()), expected)


class Tied(nn.Module):
    """A layer whose weight is used a second time without it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(15, 40)
        self.square = nn.Linear(40, 40)
        self.last = nn.Linear(40, 4)

    def forward(self, x_NCT: Tensor) -> Tensor:
        x = torch.tanh(self.square(torch.tanh(self.wide(x_NCT.flatten(1)))))
        result: Tensor = self.last(torch.tanh(nn.functional.linear(x, self.square.weight)))
        return result


def build_tied(_: int) -> Tied:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(0)
        return Tied()


@pytest.mark.parametrize("name", ["sgd", "torch sgd"])
def test_a_weight_that_is_used_beside_its_layer_travels_whole_where_an_example_shows_it(name: str) -> None:
    how = {**RULES, **OPTIMIZERS}[name]
    factors = member(ExchangeKind.FACTORS)
    (expected,) = together(1, build_tied, how, loop())
    ends = together(2, build_tied, how, loop(), options=DistributeOptions(example=example()), member=factors)
    assert_same(ends, expected)


def test_such_a_weight_is_refused_where_only_the_batch_size_is_said() -> None:
    options = DistributeOptions(batch_size=BATCH // 2)
    with pytest.raises(
        UsageError, match=r"'square\.weight' is used beside the forward pass of its own layer"
    ):
        together(2, build_tied, SGD(lr=0.1), loop(), options=options, member=member(ExchangeKind.FACTORS))


@pytest.mark.parametrize("mends", [False, True])
def test_a_worker_whose_optimizer_drifts_is_found(mends: bool) -> None:
    """After step 3 the momentum of one worker changes by itself; the workers compare after every second step."""
    member = Membership(
        timeout_s=TIMEOUT_S,
        options=ExchangeOptions(
            check_every=2, on_divergence=OnDivergence.MEND if mends else OnDivergence.STOP
        ),
    )
    optimizers: dict[nn.Module, torch.optim.Optimizer] = {}

    def how(net: nn.Module) -> torch.optim.Optimizer:
        optimizers[net] = OPTIMIZERS["torch sgd"](net)
        return optimizers[net]

    def body(module: nn.Module, group: Group) -> None:
        def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if group.rank == 1 and group.steps == 3:
                next(iter(optimizer.state.values()))["momentum_buffer"].view(-1)[0] += 1

        optimizers[module].register_step_post_hook(spoil)
        loop()(module, group)

    if mends:
        first, second = together(2, build, how, body, member=member)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    else:
        with pytest.raises(JobError, match=r"momentum_buffer.* on worker 1 .* 4 .equal after iteration 2"):
            together(2, build, how, body, member=member)


def test_stale_workers_end_alike() -> None:
    first, second = together(2, build, SGD(lr=0.01), loop(), member=member(staleness=2))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, msg=name)


def test_what_is_not_trained_begins_alike() -> None:
    first, second = together(2, build, SGD(lr=0.0), lambda module, group: None, member=member())
    for name, value in build(0).state_dict().items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def of_batches(body: Callable[[nn.Module, Group, Tensor], None]) -> Callable[[nn.Module, Group], None]:
    def run(module: nn.Module, group: Group) -> None:
        for ((x, _),) in batches():
            body(module, group, x[group.rank :: group.size, :, 0])

    return run


def a_step(module: nn.Module, group: Group, x: Tensor) -> None:
    module.zero_grad()
    module(x).square().mean().backward()
    group.step()


@pytest.mark.parametrize("how", [SGD(lr=0.1), OPTIMIZERS["torch sgd"]])
@pytest.mark.parametrize("buffers", Buffers)
def test_running_statistics(buffers: Buffers, how: How) -> None:
    options = DistributeOptions(buffers=buffers)
    ends = together(2, lambda _: Normed(), how, of_batches(a_step), options=options, member=member())
    alike = torch.equal(ends[0]["1.running_mean"], ends[1]["1.running_mean"])
    assert alike == (buffers is Buffers.AVERAGE)
    assert int(ends[1]["1.num_batches_tracked"]) == STEPS
    assert torch.equal(ends[0]["0.weight"], ends[1]["0.weight"])


def test_mean_and_sampler() -> None:
    def body(module: nn.Module, group: Group) -> None:
        assert group.mean(float(group.rank)) == 0.5
        assert group.mean(0.1) == 0.1  # a number of Python keeps its digits
        assert torch.equal(group.mean(torch.tensor([1.0, 2]) * (1 + 2 * group.rank)), torch.tensor([2.0, 4]))
        assert (
            group.mean(torch.tensor(3 + group.rank)).item() == 3.5
        )  # whole numbers have a mean that is none
        assert list(group.sampler(range(4), shuffle=False)) == [group.rank, 2 + group.rank]
        assert group.device == torch.device("cpu")

    together(2, build, SGD(lr=0.1), body, member=member())


def test_a_stop_ends_all_loops_after_the_same_step() -> None:
    stopped: dict[int, int] = {}

    def body(module: nn.Module, group: Group) -> None:
        if group.rank == 0:
            group._exchange.control.request(SignalKind.STOP)
        for _ in range(50):
            a_step(module, group, torch.ones(2, 3))
            if group.stopping:
                stopped[group.rank] = group.steps
                with pytest.raises(KeyboardInterrupt, match=f"after step {group.steps}"):
                    a_step(module, group, torch.ones(2, 3))
                return

    with pytest.raises(UsageError, match="settle"):  # the loop above has left in the middle of a step
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())
    assert len(set(stopped.values())) == 1
    assert set(stopped) == {0, 1}


def test_who_makes_more_steps_than_another_worker_hears_of_it() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for _ in range(2 + group.rank):
            a_step(module, group, torch.ones(2, 3))

    with pytest.raises(PeerLost, match=r"worker 0 has left after 2 iterations, and worker 1 goes on"):
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loop_reports_its_position_while_it_waits(staleness: int) -> None:
    """Worker 0 is in a collection after its step; worker 1 joins only once that was reported."""
    reported: list[LoopPosition] = []
    waits = threading.Event()

    def note(position: LoopPosition) -> None:
        reported.append(position)
        if position.collection:
            waits.set()

    def body(module: nn.Module, group: Group) -> None:
        if group.rank == 0:
            group._collections.on_progress = note
        a_step(module, group, torch.ones(2, 3))
        assert group.rank == 0 or waits.wait(TIMEOUT_S)
        group.mean(1.0)
        group.settle()

    together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member(staleness=staleness))
    first = [
        LoopPosition(steps=1, collections=0),
        LoopPosition(steps=1, collections=1, collection="mean"),
        LoopPosition(steps=1, collections=1),
    ]
    assert reported[:3] == first
    barriers = [position for position in reported[3:] if position.collection == "settle"]
    assert [position.collections for position in barriers] == ([2, 3, 4] if staleness else [])


def test_a_mean_after_unequal_numbers_of_steps_is_refused() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for _ in range(1 + group.rank):
            a_step(module, group, torch.ones(2, 3))
        group.mean(1.0)

    with pytest.raises(
        UsageError, match=r"mean\(\) was called after 1, 2 steps on the workers; expected as many on each"
    ):
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())


# -- misuse ------------------------------------------------------------------------------------------------


def twice(module: nn.Module, group: Group) -> None:
    for _ in range(2):
        module(torch.ones(2, 3)).sum().backward()


def never(module: nn.Module, group: Group) -> None:
    group.step()


def settles_within(module: nn.Module, group: Group) -> None:
    module(torch.ones(2, 3)).sum().backward()
    group.settle()


def rate_within(module: nn.Module, group: Group) -> None:
    assert isinstance(group, RuleGroup)
    module(torch.ones(2, 3))
    group.lr = 0.5


def by_closure(module: nn.Module, group: Group) -> None:
    torch.optim.Optimizer.zero_grad(group._optimizer)  # type: ignore[attr-defined]
    group._optimizer.step(lambda: 0.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (twice, r"1 (time|backward pass).*expected step\(\)"),
        (never, "without a backward pass"),
        (settles_within, "between a backward pass"),
    ],
)
@pytest.mark.parametrize("how", [SGD(lr=0.1), lambda net: torch.optim.SGD(net.parameters(), lr=0.1)])
def test_a_loop_in_the_wrong_order(how: How, body: Callable[[nn.Module, Group], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        together(1, lambda _: Normed(), how, body)


def test_what_only_one_way_can_do_wrong() -> None:
    with pytest.raises(UsageError, match="before its forward pass"):
        together(1, lambda _: Normed(), SGD(lr=0.1), rate_within)
    with pytest.raises(UsageError, match="closure"):
        together(1, lambda _: Normed(), OPTIMIZERS["torch sgd"], by_closure)
    with pytest.raises(UsageError, match="--table_staleness=0, not 1"):
        together(2, lambda _: Normed(), OPTIMIZERS["torch sgd"], never, member=member(staleness=1))


def test_a_rate_set_between_steps_counts_from_the_next_one() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0)
    with poseidon.distribute(module, SGD(lr=1.0)) as group:
        for rate, expected in ((1.0, -1.0), (0.5, -1.5)):
            group.lr = rate
            module(torch.ones(1, 1)).sum().backward()
            group.step()
            assert module.weight.item() == expected


def left_over(*, drops: bool, thrown: bool = True) -> Callable[[nn.Module, Group], None]:
    """Two steps of two passes each, behind the first a pass that is left over, which is dropped or stepped by itself."""

    def body(module: nn.Module, group: Group) -> None:
        for step in range(2):
            module.zero_grad()
            for ((x, y),) in batches()[2 * step : 2 * step + 2]:
                assert group.pending < 2
                own = slice(group.rank, None, group.size)
                nn.functional.mse_loss(module(x[own]), y[own]).backward()
            group.step()
            if step == 0 and thrown:
                module.zero_grad()
                x, y = batches()[5][0]
                own = slice(group.rank, None, group.size)
                nn.functional.mse_loss(module(x[own]), y[own]).backward()
                assert group.pending == 1
                (group.drop if drops else group.step)()
                assert group.pending == 0
        assert group.steps == 2 + (thrown and not drops)

    return body


@pytest.mark.parametrize("how", [RULES["sgd"], OPTIMIZERS["torch sgd"]], ids=["rule", "optimizer"])
@pytest.mark.parametrize("kind", [ExchangeKind.SERVER, ExchangeKind.FACTORS])
def test_a_pass_that_is_left_over_is_dropped_or_stepped(how: How, kind: ExchangeKind) -> None:
    options = DistributeOptions(passes=2, example=example())
    run = partial(together, 2, build, how, options=options, member=member(kind))
    assert_same(run(left_over(drops=True)), run(left_over(drops=True, thrown=False))[0], rtol=0)
    (alone,) = together(1, build, how, left_over(drops=False), options=options)
    assert_same(run(left_over(drops=False)), alone)


@pytest.mark.parametrize("how", [SGD(lr=0.1), OPTIMIZERS["torch sgd"]])
def test_what_has_left_cannot_be_dropped(how: How) -> None:
    def body(module: nn.Module, group: Group) -> None:
        group.drop()  # nothing
        module(torch.ones(2, 3)).sum().backward()
        with pytest.raises(UsageError, match=r"drop\(\) after pass 1 of 1, whose gradients have left"):
            group.drop()
        group.step()

    together(1, lambda _: Normed(), how, body)


def test_other_modules_on_other_workers() -> None:
    with pytest.raises(ServerError, match="differ"):
        together(2, lambda rank: nn.Linear(3, 2 + rank), SGD(lr=0.1), never, member=Membership(timeout_s=3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"passes": 0}, "passes is 0"),
        ({"clip": 0.0}, "clip is 0"),
        ({"buffers": "no"}, "buffers is 'no'; expected 'average' or 'own'"),
        ({"example": (1,), "batch_size": 2}, "not both"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        poseidon.distribute(Normed(), SGD(lr=0.1), **arguments)


def test_how_is_a_rule_or_an_optimizer_of_the_module() -> None:
    with pytest.raises(UsageError, match="was given a str"):
        poseidon.distribute(Normed(), "sgd")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="2 of the optimizer's 2 parameters are not the module's"):
        poseidon.distribute(Normed(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"fits the group 'x\.\*'"):
        poseidon.distribute(Normed(), SGD(lr=0.1, groups=(ParameterGroup(names="x.*"),)))


def test_one_call_a_job() -> None:
    with running_in(WorkerContext()):
        poseidon.distribute(Normed(), SGD(lr=0.1))
        with pytest.raises(UsageError, match="second time"):
            poseidon.distribute(Normed(), SGD(lr=0.1))
    assert poseidon.this_worker() == poseidon.ThisWorker(rank=0, size=1)
