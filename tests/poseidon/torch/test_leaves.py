"""A checkpoint is resumed by another number of workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.errors import SnapshotError
from poseidon.torch.group import Group
from poseidon.torch.update_rules import SGD, Adam
from tests.support.module_groups import Body, How, assert_same, member, together

RECORDS, WHOLE, EPOCHS = 30, 12, 2
"""12 records a step: 3 steps an epoch, the last one of 6."""


class Records(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        data = torch.Generator().manual_seed(2)
        self.x = torch.randn(RECORDS, 3, generator=data)
        self.y = torch.randn(RECORDS, 1, generator=data)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def build(rank: int) -> nn.Module:
    module = nn.Linear(3, 1)
    nn.init.constant_(module.weight, 0.1)
    nn.init.zeros_(module.bias)
    return module


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def body(until: int, state: list[dict[str, Any]], resumes: bool) -> Body:
    """Return a loop to a step, whose state it then keeps; with `resumes` from the state."""

    def run(module: nn.Module, group: Group) -> None:
        loader = group.loader(Records(), WHOLE // group.size, even=False)
        if resumes:
            group.load_state_dict(state[-1] if group.rank == 0 else None)
        for _ in range(loader.sampler.epoch, EPOCHS):  # type: ignore[union-attr]
            for x, y in loader:
                group.weigh(nn.functional.mse_loss(module(x), y)).backward()
                group.step()
                if group.steps == until:
                    found = group.state_dict()
                    if group.rank == 0:
                        state.append(copy.deepcopy(found))
                    return

    return run


HOWS: dict[str, How] = {
    "sgd": SGD(lr=0.1, momentum=0.9),
    "adam": Adam(lr=0.05, eps=1e-3),
    "torch": momentum,
}


@pytest.mark.parametrize("until", [1, 2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_others_read_what_is_left_of_the_epoch(before: int, after: int, until: int) -> None:
    how = HOWS["sgd"]
    (alone,) = together(1, build, how, body(-1, [], resumes=False))
    state: list[dict[str, Any]] = []
    together(before, build, how, body(until, state, resumes=False))
    assert_same(together(after, build, how, body(-1, state, resumes=True)), alone)


@pytest.mark.parametrize("how", [HOWS["adam"], HOWS["torch"]])
def test_histories_and_optimizers_are_taken_over_and_saved_again(how: How) -> None:
    (alone,) = together(1, build, how, body(-1, [], resumes=False))
    state: list[dict[str, Any]] = []
    together(3, build, how, body(1, state, resumes=False))
    together(2, build, how, body(2, state, resumes=True))
    assert [one["workers"] for one in state] == [3, 2]
    assert_same(together(3, build, how, body(-1, state, resumes=True)), alone)


def test_histories_of_each_worker_are_averaged() -> None:
    state: list[dict[str, Any]] = []
    job = member(staleness=1)

    def steps(count: int, resumes: bool) -> Body:
        def run(module: nn.Module, group: Group) -> None:
            if resumes:
                group.load_state_dict(state[-1] if group.rank == 0 else None)
                found = group.state_dict()
                if group.rank == 0:
                    state.append(found)
            for _ in range(count):
                module(torch.full((1, 3), 1.0 + group.rank)).sum().backward()
                group.step()
            if not resumes:
                found = group.state_dict()
                if group.rank == 0:
                    state.append(copy.deepcopy(found))

        return run

    together(2, build, HOWS["sgd"], steps(2, resumes=False), member=job)
    together(3, build, HOWS["sgd"], steps(0, resumes=True), member=job)
    means = [sum(one["history"]["weight"][0] for one in s["own"]) / len(s["own"]) for s in state]
    torch.testing.assert_close(means[0], means[1])


class Place:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_states_of_each_worker_need_as_many_workers() -> None:
    state: list[dict[str, Any]] = []
    seen: list[int] = [0, 0]

    def keeps(act: Callable[[Group, Place], None]) -> Body:
        def run(module: nn.Module, group: Group) -> None:
            place = Place()
            group.keep_own(stream=place)
            act(group, place)

        return run

    def saves(group: Group, place: Place) -> None:
        place.at = 5 + group.rank
        found = group.state_dict()
        if group.rank == 0:
            state.append(found)

    def loads(group: Group, place: Place) -> None:
        group.load_state_dict(state[0] if group.rank == 0 else None)
        seen[group.rank] = place.at

    together(2, build, HOWS["sgd"], keeps(saves))
    together(2, build, HOWS["sgd"], keeps(loads))
    assert seen == [5, 6]
    with pytest.raises(SnapshotError, match=r"the states of stream belong to each worker"):
        together(1, build, HOWS["sgd"], keeps(loads))
    with pytest.raises(SnapshotError, match=r"keeps stream; .* handed nothing to keep_own\(\)"):
        together(
            2,
            build,
            HOWS["sgd"],
            lambda module, group: group.load_state_dict(state[0] if group.rank == 0 else None),
        )
