"""Batches of different sizes: the mean over all records, and epochs that end together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import UsageError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions
from poseidon.torch.update_rules import SGD
from tests.support.module_groups import (
    BATCH,
    OPTIMIZERS,
    RULES,
    Body,
    How,
    assert_same,
    batches,
    build,
    example,
    loop,
    member,
    together,
)

SHARES = {2: (0, 8, BATCH), 3: (0, 1, 8, BATCH)}
"""The bounds of each worker's part of a batch: 8 and 4 records, or 1, 7 and 4."""


def unequal(module: nn.Module, group: Group) -> None:
    bounds = SHARES[group.size]
    for ((x, y),) in batches():
        own = slice(*bounds[group.rank : group.rank + 2])
        module.zero_grad()
        loss = nn.functional.mse_loss(module(x[own]), y[own])
        group.weigh(loss, len(x[own])).backward()
        group.step()


CASES: list[tuple[str, int, How, ExchangeKind, DistributeOptions]] = [
    ("a rule", 2, RULES["sgd"], ExchangeKind.HYBRID, DistributeOptions()),
    ("a rule", 3, RULES["sgd"], ExchangeKind.HYBRID, DistributeOptions()),
    ("clip", 2, RULES["sgd"], ExchangeKind.HYBRID, DistributeOptions(clip=0.05)),
    ("factors", 2, RULES["sgd"], ExchangeKind.FACTORS, DistributeOptions(example=example())),
    ("all-reduce", 2, RULES["sgd"], ExchangeKind.ALLREDUCE, DistributeOptions()),
    ("torch", 2, OPTIMIZERS["torch sgd"], ExchangeKind.HYBRID, DistributeOptions()),
    ("torch", 3, OPTIMIZERS["torch adamw"], ExchangeKind.HYBRID, DistributeOptions(clip=0.05)),
]


@pytest.mark.parametrize(
    ("workers", "how", "kind", "options"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]} {case[1]}" for case in CASES],
)
def test_batches_of_different_sizes_equal_one_process_with_the_whole_batch(
    workers: int, how: How, kind: ExchangeKind, options: DistributeOptions
) -> None:
    ends = together(workers, build, how, unequal, member=member(kind), options=options)
    (alone,) = together(1, build, how, loop(), options=DistributeOptions(clip=options.clip))
    assert_same(ends, alone)


def test_passes_of_different_sizes_equal_one_pass_with_all_records() -> None:
    def body(module: nn.Module, group: Group) -> None:
        own = ((0, 5, 8), (8, 9, 12))[group.rank]
        for ((x, y),) in batches():
            for part in (slice(*own[:2]), slice(*own[1:])):
                loss = nn.functional.mse_loss(module(x[part]), y[part])
                group.weigh(loss, len(x[part]), of=own[2] - own[0]).backward()
            group.step()

    ends = together(2, build, RULES["sgd"], body, options=DistributeOptions(passes=2))
    (alone,) = together(1, build, RULES["sgd"], loop())
    assert_same(ends, alone)


RATE = 0.1


def line(rank: int) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def epochs(of: Callable[[Group], Iterator[Tensor]], counts: list[list[int]]) -> Body:
    """Return a loop whose gradients are the mean of the records of a step."""

    def body(module: nn.Module, group: Group) -> None:
        for x in of(group):
            counts[group.rank].append(len(x))
            group.weigh(module(x[:, None]).mean()).backward()
            group.step()

    return body


@pytest.mark.parametrize(
    ("records", "workers", "sizes"),
    [
        (10, 2, [[4, 1], [4, 1]]),
        (9, 2, [[4, 1], [4, 1]]),
        (11, 3, [[4], [4], [3]]),
        (5, 3, [[2], [2], [1]]),
        (2, 3, [[1], [1], [1]]),
    ],
)
def test_each_record_counts_once_in_an_epoch(
    records: int, workers: int, sizes: list[list[int]]
) -> None:
    values = torch.arange(1.0, records + 1)
    counts: list[list[int]] = [[] for _ in range(workers)]

    def of(group: Group) -> Iterator[Tensor]:
        return iter(group.loader(values, 4, shuffle=False, even=False))  # type: ignore[arg-type]

    (end, *_) = together(workers, line, SGD(lr=RATE), epochs(of, counts))
    steps = values.split(4 * workers)
    expected = -RATE * sum(step.mean() for step in steps)
    torch.testing.assert_close(end["weight"].reshape(()), expected)
    assert counts == sizes


def test_a_loop_goes_on_until_the_batches_of_all_workers_have_ended() -> None:
    own = [[torch.ones(2)], [torch.full((2,), 3.0), torch.full((1,), 5.0), torch.ones(3)]]
    seen: list[list[float]] = [[], []]

    def body(module: nn.Module, group: Group) -> None:
        for _ in range(2):
            for x in group.epoch(own[group.rank]):
                seen[group.rank].append(float(x[0]))
                group.weigh(module(x[:, None]).mean(), len(x)).backward()
                group.step()

    (end, _) = together(2, line, SGD(lr=RATE), body)
    torch.testing.assert_close(end["weight"].reshape(()), torch.tensor(-RATE * 2 * (2.0 + 5 + 1)))
    assert seen == [[1.0] * 6, [3.0, 5.0, 1.0] * 2]


def test_a_loader_of_the_group_goes_through_epoch() -> None:
    values = torch.arange(1.0, 8)
    counts: list[list[int]] = [[], []]

    def of(group: Group) -> Iterator[Tensor]:
        return group.epoch(group.loader(values, 3, shuffle=False, even=False))  # type: ignore[arg-type]

    (end, _) = together(2, line, SGD(lr=RATE), epochs(of, counts))
    torch.testing.assert_close(end["weight"].reshape(()), torch.tensor(-RATE * (3.5 + 7)))
    assert counts == [[3, 1], [3, 1]]


def short_batches(module: nn.Module, group: Group) -> None:
    for x in group.loader(torch.ones(5), 4, even=False):  # type: ignore[arg-type]
        module(x[:, None]).mean().backward()
        group.step()


def fillers(module: nn.Module, group: Group) -> None:
    for x in group.epoch([torch.ones(1)] * (1 + group.rank)):
        module(x[:, None]).mean().backward()
        group.step()


def unknown(module: nn.Module, group: Group) -> None:
    group.weigh(module(torch.ones(1)).mean())


def negative(module: nn.Module, group: Group) -> None:
    group.weigh(module(torch.ones(1)).mean(), -1)


def no_batch(module: nn.Module, group: Group) -> None:
    list(group.epoch([torch.ones(1)] * group.rank))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (short_batches, r"have different numbers of records, .*call group\.weigh\(loss\)"),
        (fillers, r"have different numbers of records"),
        (unknown, r"weigh\(\) needs the number of records of this batch"),
        (negative, r"weigh\(\) was given -1 records; expected 0 or more"),
        (no_batch, r"worker 0 has no batch, but"),
    ],
)
def test_a_mean_that_would_be_wrong_is_refused(body: Body, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        together(2, line, SGD(lr=RATE), body)


def test_each_record_once_and_batches_of_one_size_exclude_each_other() -> None:
    def body(module: nn.Module, group: Group) -> None:
        group.loader(torch.ones(5), 4, even=False, drop_last=True)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"even=False and drop_last=True"):
        together(1, line, SGD(lr=RATE), body)


def test_losses_are_weighed_only_where_gradients_are_averaged_in_each_step() -> None:
    with pytest.raises(UsageError, match=r"weigh\(\) needs --staleness=0"):
        together(2, line, SGD(lr=RATE), negative, member=member(staleness=1))


def test_equal_batches_keep_their_loss() -> None:
    seen = []

    def body(module: nn.Module, group: Group) -> None:
        loss = module(torch.ones(1)).sum()
        seen.append(group.weigh(loss, 3) is loss)

    together(2, line, SGD(lr=RATE), body)
    assert seen == [True, True]


def test_an_epoch_is_resumed_with_the_same_sizes() -> None:
    values = torch.arange(1.0, 8)
    state: list[dict[str, object]] = []

    def first(module: nn.Module, group: Group) -> None:
        for x in group.loader(values, 2, even=False):  # type: ignore[arg-type]
            group.weigh(module(x[:, None]).mean()).backward()
            group.step()
            if group.steps == 1:
                state.append(copy.deepcopy(group.state_dict()))

    def again(module: nn.Module, group: Group) -> None:
        loader = group.loader(values, 2, even=False)  # type: ignore[arg-type]
        group.load_state_dict(next((s for s in state if s), None) if group.rank == 0 else None)
        for x in loader:
            group.weigh(module(x[:, None]).mean()).backward()
            group.step()

    whole = together(2, line, SGD(lr=RATE), first)
    assert_same(together(2, line, SGD(lr=RATE), again), whole[0], rtol=0)
