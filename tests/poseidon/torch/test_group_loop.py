"""Steps of a group: their order, collections, stops and dropped passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.base.call_names import LoopPosition
from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from poseidon.torch.updates.rule import RuleUpdate
from ps_server import PeerLost, SignalKind
from tests.support.cluster import TIMEOUT_S
from tests.support.module_groups import (
    OPTIMIZERS,
    RULES,
    How,
    Normed,
    a_step,
    assert_same,
    batches,
    build,
    example,
    member,
    never,
    together,
)


def test_mean_and_sampler() -> None:
    def body(module: nn.Module, group: Group) -> None:
        assert group.mean(float(group.rank)) == 0.5
        assert group.mean(0.1) == 0.1  # a number of Python keeps its digits
        assert torch.equal(
            group.mean(torch.tensor([1.0, 2]) * (1 + 2 * group.rank)), torch.tensor([2.0, 4])
        )
        # whole numbers have a mean that is none
        assert group.mean(torch.tensor(3 + group.rank)).item() == 3.5
        assert list(group.sampler(range(4), shuffle=False)) == [group.rank, 2 + group.rank]
        assert group.device == torch.device("cpu")

    together(2, build, SGD(lr=0.1), body, member=member())


def test_a_stop_ends_all_loops_after_the_same_step() -> None:
    stopped: dict[int, int] = {}

    def body(module: nn.Module, group: Group) -> None:
        if group.rank == 0:
            group._loop.exchanged.exchange.control.request(SignalKind.STOP)
        for _ in range(50):
            a_step(module, group, torch.ones(2, 3))
            if group.stopping:
                stopped[group.rank] = group.steps
                with pytest.raises(KeyboardInterrupt, match=f"after step {group.steps}"):
                    a_step(module, group, torch.ones(2, 3))
                return

    # the loop above has left in the middle of a step
    with pytest.raises(UsageError, match="settle"):
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())
    assert len(set(stopped.values())) == 1
    assert set(stopped) == {0, 1}


def test_who_makes_more_steps_than_another_worker_hears_of_it() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for _ in range(2 + group.rank):
            a_step(module, group, torch.ones(2, 3))

    with pytest.raises(PeerLost, match="worker 0 has left"):
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
            group._loop.collections.on_progress = note
        a_step(module, group, torch.ones(2, 3))
        assert group.rank == 0 or waits.wait(TIMEOUT_S)
        group.mean(1.0)
        group.settle()

    together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member(staleness=staleness))
    first = [
        LoopPosition(collection="step", loop=None),
        LoopPosition(iterations=1),
        LoopPosition(steps=1, iterations=1),
        LoopPosition(steps=1, iterations=1, collections=1, collection="mean"),
        LoopPosition(steps=1, iterations=1, collections=1),
    ]
    assert reported[:5] == first
    barriers = [(p.collection, p.collections) for p in reported[5:] if p.collection]
    assert barriers == ([("settle", 2), ("settle", 3), ("close", 4)] if staleness else [])


def test_a_mean_after_unequal_numbers_of_steps_is_refused() -> None:
    def body(module: nn.Module, group: Group) -> None:
        for _ in range(1 + group.rank):
            a_step(module, group, torch.ones(2, 3))
        group.mean(1.0)

    words = r"worker 0 calls mean\(\) after step 1, but worker 1 calls mean\(\) after step 2; all"
    with pytest.raises(UsageError, match=words):
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Group.state_dict, "state_dict"),
        (lambda group: group.save("x"), "save"),
        (Group.resume, "resume"),
        (lambda group: group.load_state_dict(None), "load_state_dict"),
    ],
)
def test_a_call_on_one_worker_alone_is_known_to_wait(
    call: Callable[[Group], object], name: str
) -> None:
    """Its position says so from the first thing on that it waits for, so that the launcher can
    end the job.
    """
    reported: list[LoopPosition] = []

    def body(module: nn.Module, group: Group) -> None:
        if group.rank == 0:
            group._loop.collections.on_progress = reported.append
            call(group)
        else:
            group.close()
            raise PeerLost("left")

    with pytest.raises(PeerLost):
        together(2, lambda _: Normed(), SGD(lr=0.1), body, member=member())
    waits = next(position for position in reported if position.collection)
    assert waits == LoopPosition(steps=0, collections=1, collection=name)


def twice(module: nn.Module, group: Group) -> None:
    for _ in range(2):
        module(torch.ones(2, 3)).sum().backward()


def settles_within(module: nn.Module, group: Group) -> None:
    module(torch.ones(2, 3)).sum().backward()
    group.settle()


def rate_within(module: nn.Module, group: Group) -> None:
    assert isinstance(group._update, RuleUpdate)
    module(torch.ones(2, 3))
    group.lr = 0.5


def steps_within(module: nn.Module, group: Group) -> None:
    """As an optimizer that runs in a hook of its parameter."""
    loss = module(torch.ones(2, 3)).sum()
    list(module.parameters())[-1].register_post_accumulate_grad_hook(
        lambda _: group.step() and None
    )
    loss.backward()


def calls_the_group(module: nn.Module, group: Group) -> None:
    """As a module that DDP has wrapped."""
    group(torch.ones(2, 3))


def by_closure(module: nn.Module, group: Group) -> None:
    torch.optim.Optimizer.zero_grad(group._update.optimizer)  # type: ignore[attr-defined]
    group._update.optimizer.step(lambda: 0.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (twice, r"1 (time|backward pass).*call step\(\)"),
        (never, r"without a backward pass .* call .*autograd\.backward"),
        (settles_within, "between a backward pass"),
        (steps_within, "within a backward pass, for example in a hook of a parameter"),
        (calls_the_group, "a group is not a module"),
    ],
)
@pytest.mark.parametrize(
    "how", [SGD(lr=0.1), lambda net: torch.optim.SGD(net.parameters(), lr=0.1)]
)
def test_a_loop_in_the_wrong_order(
    how: How, body: Callable[[nn.Module, Group], None], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        together(1, lambda _: Normed(), how, body)


def test_what_only_one_way_can_do_wrong() -> None:
    with pytest.raises(UsageError, match="before the forward pass"):
        together(1, lambda _: Normed(), SGD(lr=0.1), rate_within)
    with pytest.raises(UsageError, match=r"^step\(\) was given a closure, .* without a closure$"):
        together(1, lambda _: Normed(), OPTIMIZERS["torch sgd"], by_closure)
    with pytest.raises(UsageError, match=r"^LBFGS runs the loss itself"):
        together(1, lambda _: Normed(), lambda net: torch.optim.LBFGS(net.parameters()), never)
    with pytest.raises(UsageError, match="--staleness=0, not 1"):
        together(2, lambda _: Normed(), OPTIMIZERS["torch sgd"], never, member=member(staleness=1))


@pytest.mark.parametrize("how", [SGD(lr=0.1), OPTIMIZERS["torch sgd"]])
def test_a_process_that_a_worker_has_forked_takes_no_part(how: How) -> None:
    """It may run the module once all values are there."""

    def body(module: nn.Module, group: Group) -> None:
        a_step(module, group, torch.ones(2, 3))
        worker, group._loop.exchanged.reads._process = group._loop.exchanged.reads._process, -1
        if isinstance(how, SGD):
            with pytest.raises(UsageError, match=r"before its new value has arrived; .*settle"):
                module(torch.ones(2, 3))
            group._loop.exchanged.reads._process = worker
            group.settle()
            group._loop.exchanged.reads._process = -1
        loss = module(torch.ones(2, 3)).sum()
        calls: list[Callable[[], object]] = [loss.backward, group.step, lambda: group.mean(1.0)]
        for call in calls:
            with pytest.raises(UsageError, match=r"\(\) was called in a process that this worker"):
                call()
        group._loop.exchanged.reads._process = worker
        a_step(module, group, torch.ones(2, 3))
        assert group.steps == 2

    together(2, lambda _: Normed(), how, body, member=member())


def test_a_rate_set_between_steps_counts_from_the_next_one() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0)
    with poseidon.distribute(module, SGD(lr=1.0)) as group:
        for rate, expected in ((1.0, -1.0), (0.5, -1.5)):
            group.lr = rate
            module(torch.ones(1, 1)).sum().backward()
            group.step()
            assert module.weight.item() == expected


EndStep = Callable[[], object]


def plain(net: nn.Module, x: Tensor, step: EndStep) -> None:
    for _ in range(3):
        net(x).square().mean().backward()
        step()


def clears_before(net: nn.Module, x: Tensor, step: EndStep) -> None:
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        net(x).square().mean().backward()
        step()


def clears_after(net: nn.Module, x: Tensor, step: EndStep) -> None:
    for _ in range(3):
        net(x).square().mean().backward()
        step()
        net.zero_grad()


def accumulates(net: nn.Module, x: Tensor, step: EndStep) -> None:
    for _ in range(3):
        for factor in (1, 2):
            (net(x * factor).square().mean() / 2).backward()
        step()


LOOPS = (plain, clears_before, clears_after, accumulates)


def freezes(net: nn.Module, x: Tensor, step: EndStep) -> None:
    for wants in (True, False, True):
        net.get_submodule("2").requires_grad_(wants)
        net(x).square().mean().backward()
        step()


def two_layers(_: int = 0) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return net


def in_groups(net: nn.Module) -> torch.optim.Optimizer:
    first, last = (list(net.get_submodule(name).parameters()) for name in ("0", "2"))
    return torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.3}], lr=0.1, momentum=0.9)


def of_the_last(net: nn.Module) -> torch.optim.Optimizer:
    """The first layer wants gradients, but is neither trained nor exchanged."""
    return torch.optim.SGD(net.get_submodule("2").parameters(), lr=0.1)


def momentum_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("loop", "optimizer", "rule"),
    [
        *((loop, momentum_sgd, None) for loop in LOOPS),
        *((loop, momentum_sgd, SGD(lr=0.2, momentum=0.9)) for loop in LOOPS),
        (freezes, momentum_sgd, None),
        (plain, in_groups, None),
        (plain, of_the_last, None),
    ],
)
def test_a_step_clears_the_gradients(
    loop: Callable[[nn.Module, Tensor, EndStep], None],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rule: SGD | None,
    workers: int,
) -> None:
    """The weights equal torch's alone, whose loop clears gradients after each step."""
    x = torch.linspace(-1, 1, 24).view(8, 3)
    alone = two_layers()
    of_alone = optimizer(alone)
    loop(alone, x, lambda: (of_alone.step(), of_alone.zero_grad()))

    def body(module: nn.Module, group: Group) -> None:
        loop(module, x[group.rank :: group.size], group.step)
        assert all(parameter.grad is None for parameter in module.parameters())

    options = DistributeOptions(passes=2 if loop is accumulates else 1, batch_size=8 // workers)
    job = member(ExchangeKind.FACTORS)
    ends = together(workers, two_layers, rule or optimizer, body, options=options, member=job)
    assert_same(ends, alone.state_dict())


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_stay_after_a_step_that_says_so(workers: int) -> None:
    """They are the means, and the next pass adds to them, as in torch."""
    x = torch.linspace(-1, 1, 24).view(8, 3)
    alone = two_layers()
    optimizer = momentum_sgd(alone)
    seen: list[Tensor] = []

    def body(module: nn.Module, group: Group) -> None:
        plain(module, x[group.rank :: group.size], lambda: group.step(zero_grad=False))
        seen.append(module.get_parameter("0.weight").grad.clone())  # type: ignore[union-attr]

    plain(alone, x, optimizer.step)
    ends = together(workers, two_layers, momentum_sgd, body, member=member())
    assert_same(ends, alone.state_dict())
    expected = alone.get_parameter("0.weight").grad
    for gradient in seen:
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match=r"step\(zero_grad=False\) cannot be used with poseidon"):
        together(1, two_layers, SGD(lr=0.1), body)


def left_over(*, drops: bool, thrown: bool = True) -> Callable[[nn.Module, Group], None]:
    """Two steps of two passes each, behind the first a pass that is left over, which is dropped
    or stepped by itself.
    """

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


def test_what_has_left_for_the_shards_cannot_be_dropped() -> None:
    def body(module: nn.Module, group: Group) -> None:
        group.drop()  # nothing
        module(torch.ones(2, 3)).sum().backward()
        with pytest.raises(UsageError, match="of pass 1 have been sent to the shards"):
            group.drop()
        group.step()

    together(1, lambda _: Normed(), SGD(lr=0.1), body)
