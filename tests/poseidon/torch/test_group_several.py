"""Several modules with several optimizers in one script: a GAN, an actor and a critic."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import poseidon
from poseidon.base.call_names import LoopPosition
from poseidon.cluster.events import Alive, parse_event
from poseidon.cluster.supervision.positions import LoopPositions
from poseidon.engine.this_process import running_in
from poseidon.engine.worker_context import LoopJob, Loops, WorkerContext
from poseidon.errors import SnapshotError, UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.distribute import join
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD, UpdateRule
from ps_server import PeerLost, SignalKind
from ps_server.json_fields import fields_of
from tests.support.cluster import job_addresses
from tests.support.module_groups import BUILDING, RecordingJob, failures_of, member
from tests.support.thread_streams import generator, streams_of_threads

STEPS, BATCH = 5, 8
State = dict[str, Tensor]
Gan = tuple[nn.Module, nn.Module]


def build(rank: int = 0) -> Gan:
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(rank)
        generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return generator, critic


def batches() -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, 4, generator=data), torch.randn(BATCH, 3, generator=data))
        for _ in range(STEPS)
    ]


def optimizers(gan: Gan) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-3) for module in gan]


def train(
    gan: Gan, steps: Sequence[torch.optim.Optimizer], own: slice = slice(None), **zeroing: bool
) -> None:
    """The loop of a script that knows nothing of workers, save for its part of a batch."""
    generator, critic = gan
    for real, noise in batches():
        steps[1].zero_grad(**zeroing)
        fake = generator(noise[own])
        (critic(fake.detach()).mean() - critic(real[own]).square().mean()).backward()
        steps[1].step()
        steps[0].zero_grad(**zeroing)
        (-critic(fake).mean()).backward()
        steps[0].step()


def with_groups(
    workers: int,
    run: Callable[[int, list[WorkerContext]], object],
    kind: ExchangeKind = ExchangeKind.HYBRID,
    folder: Path | None = None,
) -> None:
    """Run a function with the contexts of two groups on a thread per worker."""
    with ExitStack() as stack:
        later = stack.enter_context(job_addresses(kind, workers, 2))

        def of_both(rank: int, first: WorkerContext) -> None:
            first = replace(first, loops=Loops(), folder=folder)
            connect = later.of(rank) if workers > 1 else first.connect
            run(rank, [first, replace(first, number=1, connect=connect)])

        failures = failures_of(workers, of_both, member=member(kind))
    if failures:
        raise failures[0]


def joined(
    gan: Gan, how: Sequence[Any], contexts: list[WorkerContext], stack: ExitStack
) -> list[Group]:
    return [
        stack.enter_context(join(module, one, DistributeOptions(), context))
        for module, one, context in zip(gan, how, contexts, strict=True)
    ]


def states(gan: Gan) -> list[State]:
    return [copy.deepcopy(module.state_dict()) for module in gan]


def assert_equal(found: list[State], expected: list[State], atol: float = 1e-6) -> None:
    for own, other in zip(found, expected, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", [ExchangeKind.HYBRID, ExchangeKind.ALLREDUCE])
@pytest.mark.parametrize("zeroing", [{}, {"set_to_none": False}])
def test_a_gan_whose_generator_gives_the_critic_gradients_trains_as_one_process(
    kind: ExchangeKind, zeroing: dict[str, bool]
) -> None:
    ends: list[list[State]] = [[], []]

    def run(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build(rank)
        how = optimizers(gan)
        with ExitStack() as stack:
            joined(gan, how, contexts, stack)
            train(gan, how, slice(rank, None, 2), **zeroing)
        ends[rank] = states(gan)

    with_groups(2, run, kind)
    alone = build()
    train(alone, optimizers(alone))
    assert_equal(ends[0], ends[1], atol=0)
    assert_equal(ends[0], states(alone))


def rules(gan: Gan) -> list[UpdateRule]:
    return [SGD(lr=0.1, momentum=0.9), SGD(lr=0.05)]


def test_under_rules_the_critic_is_frozen_while_the_generator_learns() -> None:
    ends: list[list[State]] = [[], []]

    def loop(gan: Gan, groups: list[Group], own: slice) -> None:
        generator, critic = gan
        for real, noise in batches():
            fake = generator(noise[own])
            (critic(fake.detach()).mean() - critic(real[own]).square().mean()).backward()
            groups[1].step()
            critic.requires_grad_(False)
            (-critic(fake).mean()).backward()
            critic.requires_grad_(True)
            groups[0].step()

    def run(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build(rank)
        with ExitStack() as stack:
            loop(gan, joined(gan, rules(gan), contexts, stack), slice(rank, None, len(ends)))
        ends[rank] = states(gan)

    with_groups(2, run)
    together = ends
    ends = [[]]
    with_groups(1, run)
    assert_equal(together[0], together[1], atol=0)
    assert_equal(together[0], ends[0])


def test_under_rules_gradients_that_have_left_cannot_be_cleared() -> None:
    def run(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build()
        with ExitStack() as stack:
            joined(gan, rules(gan), contexts, stack)
            train(gan, optimizers(gan))

    with pytest.raises(UsageError, match=r"read or written after 1 .*an optimizer's step\(\)"):
        with_groups(1, run)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_checkpoint_holds_all_groups(workers: int, tmp_path: Path) -> None:
    ends: list[dict[str, list[State]]] = [{} for _ in range(workers)]

    def run(rank: int, contexts: list[WorkerContext]) -> None:
        own = slice(rank, None, workers)
        for name in ("whole", "resumed"):
            gan = build(rank + len(name))
            how = optimizers(gan)
            with ExitStack() as stack:
                generator, critic = joined(gan, how, contexts, stack)
                generator.keep(critic=critic)
                if name == "resumed":
                    assert generator.resume(tmp_path / "gan")
                    assert (generator.steps, critic.steps) == (STEPS, STEPS)
                else:
                    train(gan, how, own)
                    generator.save(tmp_path / "gan")
                train(gan, how, own)
            ends[rank][name] = states(gan)

    with_runs(workers, run)
    for end in ends:
        assert_equal(end["resumed"], end["whole"], atol=0)
        assert_equal(end["whole"], ends[0]["whole"], atol=0)


def with_runs(workers: int, run: Callable[[int, list[WorkerContext]], object]) -> None:
    """As `with_groups`, with new addresses for each of two runs of each group."""
    with ExitStack() as stack:
        places = [
            stack.enter_context(job_addresses(ExchangeKind.HYBRID, workers, 2)) for _ in range(4)
        ]

        def of_both(rank: int, first: WorkerContext) -> None:
            left = iter(places)

            def connect(own: str) -> Sequence[str]:
                return next(left)(own)

            first = replace(first, loops=Loops(), connect=connect)
            run(rank, [first, replace(first, number=1)])

        failures = failures_of(workers, of_both, member=member(ExchangeKind.HYBRID))
    if failures:
        raise failures[0]


def train_once(module: nn.Module, group: Group) -> None:
    inputs = next(module.parameters()).shape[1]
    module(torch.ones(1, inputs)).sum().backward()
    group.step()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (train_once, "ends a step"),
        (lambda module, group: group.mean(1.0), "waits in mean()"),
    ],
)
def test_the_same_call_of_different_modules(
    call: Callable[[nn.Module, Group], object], words: str
) -> None:
    """It meets no call of another worker, since each module has an exchange."""

    def run(rank: int, gan: Gan, groups: list[Group]) -> None:
        for index in (0, 1, rank, 1 - rank):
            call(gan[index], groups[index])

    assert what_ends(run, optimizers) == (
        f"worker 0 {words} of module 1, and worker 1 {words} of module 2: all workers must make "
        "the same calls in the same order"
    )


def test_steps_under_rules_in_different_orders() -> None:
    """They wait for nobody, but the next use of a module waits for its values."""

    def run(rank: int, gan: Gan, groups: list[Group]) -> None:
        for index in (0, 0, 1, 1) if rank == 0 else (1, 1, 0, 0):
            train_once(gan[index], groups[index])

    assert what_ends(run, rules) == (
        "worker 0 waits for the values of module 1 after its step 1, and worker 1 waits for the "
        "values of module 2 after its step 1: all workers must make the same calls in the same "
        "order"
    )


def what_ends(run: Callable[[int, Gan, list[Group]], object], how: Callable[[Gan], Any]) -> str:
    """Run a function on two workers that a launcher watches; return its first sentence."""
    positions, said = LoopPositions(), list[str]()

    def watched(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build()

        class NotingJob(LoopJob):
            def progressed(self, position: LoopPosition) -> None:
                event = parse_event(
                    {"event": "alive", "position": json.loads(json.dumps(fields_of(position)))}
                )
                assert isinstance(event, Alive)
                assert event.position is not None
                sentence = positions.move(rank, event.position)
                if sentence is not None:
                    said.append(sentence)
                    raise UsageError(sentence)

        with ExitStack() as stack:
            noting = [replace(one, job=NotingJob()) for one in contexts]
            run(rank, gan, joined(gan, how(gan), noting, stack))

    with pytest.raises((UsageError, PeerLost)):
        with_groups(2, watched)
    return said[0]


def test_a_script_that_keeps_other_groups_is_refused(tmp_path: Path) -> None:
    def run(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build()
        with ExitStack() as stack:
            generator, critic = joined(gan, rules(gan), contexts, stack)
            generator.save(tmp_path / "gan")
            generator.keep(critic=critic)
            with pytest.raises(UsageError, match="'critic', which is this group itself or a name"):
                generator.keep(critic=critic)
            with pytest.raises(UsageError, match=r"first\.keep\(NAME=group\) and call first\."):
                critic.save()
            with pytest.raises(UsageError, match=r"first\.keep\(NAME=group\) and call first\."):
                critic.resume()
            with pytest.raises(SnapshotError, match=r"has the groups none; .* handed critic to"):
                generator.resume(tmp_path / "gan")
            assert critic.save(tmp_path / "critic") == tmp_path / "critic_iter_0.pt"

    with_groups(1, run)


def test_all_loops_hear_the_requests_of_the_first_and_report_to_one_place() -> None:
    job = RecordingJob()
    context = WorkerContext(job=job, folder=Path("none"))
    gan = build()
    how = optimizers(gan)
    with running_in(context):
        first, second = (
            poseidon.distribute(module, one) for module, one in zip(gan, how, strict=True)
        )
        job.exchanges[0].control.request(SignalKind.STOP)
        train_once(gan[1], second)
        assert not second.stopping
        train_once(gan[0], first)
        assert first.stopping
        assert second.stopping
        train_once(gan[1], second)  # only the loop that was asked ends by itself
        assert job.positions[-1] == LoopPosition(steps=1, iterations=3, loop=1, loops=(1, 2))
        with pytest.raises(KeyboardInterrupt):
            train_once(gan[0], first)
    assert first._loop.session.state.name == "CLOSED"
    assert second._loop.session.state.name == "CLOSED"
    assert poseidon.this_worker() == poseidon.ThisWorker(rank=0, size=1)


def test_gradients_that_have_left_are_dropped_under_an_optimizer() -> None:
    ends: list[list[State]] = [[], []]

    def run(rank: int, contexts: list[WorkerContext]) -> None:
        gan = build()
        optimizer = torch.optim.SGD(gan[1].parameters(), lr=0.1)
        with join(gan[1], optimizer, DistributeOptions(), contexts[0]) as group:
            gan[1](torch.full((1, 4), 9.0)).sum().backward()
            group.drop()
            assert all(parameter.grad is None for parameter in gan[1].parameters())
            gan[1](torch.ones(1, 4)).sum().backward()
            group.step()
            assert group.steps == 1
        ends[rank] = states(gan)

    with_groups(2, run)
    alone = build()
    optimizer = torch.optim.SGD(alone[1].parameters(), lr=0.1)
    alone[1](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert_equal(ends[0], states(alone))


def test_several_groups_have_virtual_workers_together() -> None:
    """The steps of both belong to the turn of one; so does what the script draws between them."""

    def trained(workers: int, *, one_after_the_other: bool = False) -> list[State]:
        ends: list[list[State]] = [[] for _ in range(workers)]
        options = DistributeOptions(virtual_workers=3)

        def run(rank: int, contexts: list[WorkerContext]) -> None:
            gan = build(rank)
            with ExitStack() as stack:
                groups = [
                    stack.enter_context(join(module, optimizer, options, context))
                    for module, optimizer, context in zip(
                        gan, optimizers(gan), contexts, strict=True
                    )
                ]
                data = TensorDataset(*(torch.cat(part) for part in zip(*batches(), strict=True)))
                for real, noise in groups[0].loader(data, 2):
                    fake = gan[0](noise + torch.rand(noise.shape, generator=generator()))
                    (gan[1](fake.detach()).mean() - gan[1](real).square().mean()).backward()
                    gan[1].requires_grad_(False)
                    (-gan[1](fake * torch.rand((), generator=generator())).mean()).backward()
                    gan[1].requires_grad_(True)
                    if one_after_the_other:
                        groups[1].step()
                        gan[1](fake)
                    assert groups[0].step() == groups[1].step()
            ends[rank] = states(gan)

        with_groups(workers, run)
        return ends[0]

    with streams_of_threads():
        found = [trained(workers) for workers in (1, 2, 3)]
        with pytest.raises(UsageError, match="the module runs on the batch of virtual worker 0"):
            trained(1, one_after_the_other=True)
    assert_equal(found[0], found[1], atol=0)
    assert_equal(found[0], found[2], atol=0)


def test_groups_of_different_numbers_of_virtual_workers_are_refused() -> None:
    def run(_: int, contexts: list[WorkerContext]) -> None:
        gan = build()
        with ExitStack() as stack:
            for module, number, context in zip(gan, (3, 2), contexts, strict=True):
                options = DistributeOptions(virtual_workers=number)
                stack.enter_context(join(module, SGD(lr=0.1), options, context))

    with pytest.raises(UsageError, match="the virtual workers 0 to 1, and an earlier one 0 to 2;"):
        with_groups(1, run)
