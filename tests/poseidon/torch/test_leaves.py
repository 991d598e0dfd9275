"""The leaves of a group's state, and a state of another number of workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.engine.leaf import packed
from poseidon.errors import PoseidonError, SnapshotError
from poseidon.exchange.options import ExchangeKind
from poseidon.torch.factor_rows import tensors_in
from poseidon.torch.group import Group
from poseidon.torch.options import DistributeOptions, Outer, RunsOn
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


class Everything(nn.Module):
    """Random numbers, statistics, a buffer that changes, and tensors of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.coarse = nn.Linear(8, 1, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 0.01
        x = nn.functional.dropout(self.norm(self.first(x)), 0.3) * (1 + self.seen)
        result: Tensor = self.coarse(x.bfloat16()).float()
        return result


class Plain(Everything):
    """The same in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = self.coarse.float()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 0.01
        result: Tensor = self.coarse(self.norm(self.first(x)) * (1 + self.seen))
        return result


def torch_adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05, eps=1e-3)


def falling(step: int) -> float:
    return 0.1 / (1 + step)


ROUNDS = {"local_steps": 2, "outer": Outer(momentum=0.5)}
JOBS: dict[str, tuple[int, type[nn.Module], How, dict[str, Any]]] = {
    "rule": (1, Everything, SGD(lr=falling, momentum=0.9), {}),
    "optimizer": (1, Everything, torch_adam, {}),
    "on the shards": (1, Everything, momentum, {"on": RunsOn.SHARDS}),
    "rounds": (2, Plain, momentum, ROUNDS),
    "rounds of a rule": (2, Plain, SGD(lr=0.1, momentum=0.9), ROUNDS),
    "a codec": (2, Plain, SGD(lr=0.1), {"compress": "first.weight=randomk:0.3"}),
    "low rank": (2, Plain, SGD(lr=0.1), {"compress": "first.weight=powersgd:1"}),
    "virtual workers": (1, Everything, SGD(lr=falling, momentum=0.9), {"virtual_workers": 3}),
    "virtual workers and an optimizer": (1, Everything, torch_adam, {"virtual_workers": 3}),
    "virtual workers in rounds": (1, Plain, momentum, {**ROUNDS, "virtual_workers": 3}),
}
"""By a name: workers, the module, its update, and arguments of `distribute`."""
FREE = {"told", "exchange_plan", "computation", "tables", "groups"}
"""Leaves that a launcher reads, or a sentence names, and no continuation; and tables, which need
files (`tables/test_group.py`), and other groups (`test_group_several.py`).
"""


def of_leaf(value: Any) -> Any:
    """Return a value that differs from a leaf's: in its tensors, or where it has none in its
    numbers and words.
    """
    floats = any(tensor.dtype.is_floating_point for tensor in tensors_in(value))

    def change(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part + 0.25 if part.dtype.is_floating_point else part.flip(0)
        if isinstance(part, dict):
            return {key: change(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return type(part)(change(inner) for inner in part)
        if floats or isinstance(part, bool | None):
            return part
        return part + ("?" if isinstance(part, str) else 1)

    return change(value)


def trained_to_the_end(
    name: str, saved: dict[str, Any] | None, save: Callable[[dict[str, Any]], None]
) -> bytes:
    """Train 6 steps, from a state if there is one. Return what the module has at the end."""
    workers, kind, how, options = JOBS[name]

    def run(module: nn.Module, group: Group) -> None:
        group.keep(place=(place := Place()))
        loader = group.loader(Records(), 5)
        if saved is not None:
            group.load_state_dict(saved if group.rank == 0 else None)
        while group.steps < 6:
            for x, y in loader:
                (nn.functional.mse_loss(module(x), y) * (1 + place.at)).backward()
                has_ended = group.step()
                module.zero_grad()
                place.at += has_ended
                if name == "rule" and group.steps == 2:
                    group.lr = 0.07
                if has_ended and group.steps == 4 and saved is None:
                    state = group.state_dict()
                    if group.rank == 0:
                        save(copy.deepcopy(state))
                if group.steps == 6:
                    break

    job = member(ExchangeKind.SERVER)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ends = together(
            workers, lambda _: kind(), how, run, options=DistributeOptions(**options), member=job
        )
    return packed([sorted(end.items()) for end in ends])


def test_each_leaf_of_a_state_matters_to_some_job() -> None:
    matters: set[str] = set()
    known: set[str] = set()
    for name in JOBS:
        states: list[dict[str, Any]] = []
        whole = trained_to_the_end(name, None, states.append)
        state = states[0]
        assert trained_to_the_end(name, copy.deepcopy(state), never_saves) == whole, name
        leaves = {*state, *(key for one in state["own"] for key in one)} - {"own", "poseidon"}
        known |= leaves
        for leaf in leaves - matters - FREE:
            changed = copy.deepcopy(state)
            for part in (changed, *changed["own"]):
                if leaf in part:
                    part[leaf] = of_leaf(part[leaf])
            try:
                if trained_to_the_end(name, changed, never_saves) != whole:
                    matters.add(leaf)
            except (PoseidonError, RuntimeError, ValueError):
                matters.add(leaf)  # it is refused
    assert known - matters == FREE & known


def never_saves(state: dict[str, Any]) -> None:
    pass
