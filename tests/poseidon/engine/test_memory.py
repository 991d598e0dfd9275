"""Where a loop of a script takes memory snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import poseidon
from poseidon.engine.leaf import unpacked
from poseidon.engine.memory import (
    FIRST,
    LEAST,
    MOST,
    Regrouped,
    ScriptMemory,
    Snapshot,
    SnapshotInterval,
)
from poseidon.engine.worker_context import WorkerContext
from poseidon.torch.distribute import join
from poseidon.torch.options import DistributeOptions


def memory(
    *,
    holds: bool = True,
    rewind: int = -1,
    resumes: bool = True,
    holds_part: bool = False,
    on_begin: Callable[[], None] = lambda: None,
) -> ScriptMemory:
    made = ScriptMemory(
        holds=holds, rewind=rewind, every=3, newest=None, holds_part=holds_part, on_begin=on_begin
    )
    made.resumes = resumes
    return made


def take(memory: ScriptMemory, content: bytes = b"state") -> None:
    """Take one where it is due."""
    memory.between(lambda _: content, lambda payload: (payload, payload), regroups=False)


def test_a_snapshot_is_taken_where_an_iteration_begins_and_nowhere_else() -> None:
    own = memory()
    assert not own.enters(0)  # nothing has been trained
    assert own.enters(1)
    take(own)
    assert not own.enters(1)  # the loop of an evaluation after the first iteration
    assert [i for i in range(2, 6) if own.enters(i) and own.is_due(i)] == [4, 5]
    assert own.newest == Snapshot(1, b"state")


def test_an_iteration_begins_where_its_first_batch_is_asked_for_and_after_a_snapshot() -> None:
    begun: list[int] = []
    own = memory(on_begin=lambda: begun.append(0))
    own.enters(0)
    own.enters(1)
    take(own)
    own.enters(1)  # of an evaluation: the one that follows counts
    own.enters(2)
    assert len(begun) == 5


def test_a_loop_that_comes_late_takes_the_one_that_was_due_before() -> None:
    own = memory(rewind=10)
    assert own.enters(12)
    take(own)
    assert own.newest == Snapshot(12, b"state")


def test_a_worker_that_holds_none_keeps_none() -> None:
    own = memory(holds=False)
    assert own.enters(1)
    take(own, b"")
    assert own.newest is None


def test_a_part_counts_once_all_workers_have_made_theirs() -> None:
    own = memory(holds=False, holds_part=True)

    def part(iteration: int, gather: Callable[[bytes], tuple[bytes, ...]]) -> None:
        assert own.enters(iteration)
        content = str(iteration).encode()
        own.between(lambda keeps: content * keeps, gather, regroups=True, is_part=True)

    with pytest.raises(Regrouped):
        part(1, lambda payload: (payload, payload))
    assert own.newest == Snapshot(1, b"1", is_part=True)
    made: list[bytes] = []

    def lose_a_worker(payload: bytes) -> tuple[bytes, ...]:
        made.append(payload)
        if len(made) == 2:
            raise ConnectionError
        return (payload, payload)

    with pytest.raises(ConnectionError):
        part(2, lose_a_worker)
    assert own.newest == own.at(1)
    assert own.at(2) == Snapshot(2, b"2", is_part=True)  # another worker may count it
    assert own.at(3) is None


def test_a_script_that_never_resumes_has_none() -> None:
    assert not memory(resumes=False).enters(1)


def taken(own: ScriptMemory, *, keeps_other: bool = True, **options: Any) -> list[int]:
    """Train three epochs of 5 steps; return the iterations of the snapshots that were taken."""
    context = WorkerContext(memory=own)
    torch.manual_seed(0)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    data = TensorDataset(torch.randn(20, 3))
    found: list[int] = []
    with ExitStack() as groups:
        group = groups.enter_context(
            join(model, poseidon.SGD(lr=0.1), DistributeOptions(**options), context)
        )
        if not keeps_other:
            groups.enter_context(
                join(other, poseidon.SGD(lr=0.1), DistributeOptions(), replace(context, number=1))
            )
        loader = group.loader(data, 4)
        assert not group.resume()
        while group.steps < 15:
            for (x,) in loader:
                model(x).sum().backward()
                group.step()
                for _ in group.loader(data, 10, seed=1):  # an evaluation
                    pass
                if own.newest is not None and own.newest.iteration not in found:
                    found.append(own.newest.iteration)
        if own.newest is not None:
            assert unpacked(own.newest.content, "memory")["steps"] == own.newest.iteration
    return found


def test_a_loop_takes_them_between_its_own_iterations() -> None:
    assert taken(memory()) == [1, 4, 7, 10, 13]


def test_rounds_of_local_steps_end_before_a_snapshot() -> None:
    assert taken(memory(), local_steps=2) == [2, 6, 10, 14]


def test_a_group_that_is_not_kept_is_no_part_of_the_state() -> None:
    assert taken(memory(), keeps_other=False) == []


def after_one(iteration_s: float, during_s: float, blocked_s: float) -> SnapshotInterval:
    """Return the interval of a worker after a snapshot at iteration 0 and ten more iterations."""
    interval = SnapshotInterval(0, every=0)
    interval.begun(0, blocked_s)
    interval.decide([(0.0, 0.0)])
    for number in range(10):
        interval.note(during_s if number < 2 else iteration_s, transferring=number < 2)
    return interval


def test_a_fixed_interval_counts_from_the_snapshot_before() -> None:
    interval = SnapshotInterval(7, every=4)
    assert interval.is_due(7)
    interval.begun(7, 0.1)
    assert not interval.is_due(11)  # not before all workers have decided
    interval.decide([(0.0, 0.0)] * 3)
    assert [i for i in range(14) if interval.is_due(i)] == [11, 12, 13]


def test_with_local_steps_one_is_due_where_a_round_ends() -> None:
    interval = SnapshotInterval(7, every=4, steps=5)
    interval.begun(7, 0.1)
    interval.decide([(0.0, 0.0)] * 3)
    assert [i for i in range(26) if interval.is_due(i)] == [15, 20, 25]


def test_the_first_measured_snapshot_comes_soon() -> None:
    interval = SnapshotInterval(7, every=0)
    interval.begun(7, 0.1)
    interval.decide([(0.5, 0.1), (0.0, 0.0)])  # one worker has measured nothing yet
    assert interval.is_due(7 + FIRST)


def test_a_cost_is_the_wait_and_what_slower_iterations_take_longer() -> None:
    cost_s, iteration_s = after_one(iteration_s=0.5, during_s=0.75, blocked_s=0.25).costs()
    assert (cost_s, iteration_s) == (0.25 + 2 * 0.25, 0.5)
    assert after_one(iteration_s=0.5, during_s=0.25, blocked_s=0.75).costs() == (0.25, 0.5)
    assert after_one(iteration_s=0.5, during_s=0.25, blocked_s=0.25).costs() == (0.0, 0.5)


def test_costs_are_a_mean_that_forgets() -> None:
    interval = after_one(iteration_s=0.5, during_s=0.5, blocked_s=1.0)
    interval.begun(10, 3.0)
    interval.note(0.5, transferring=False)
    assert interval.costs() == (0.75 * 1.0 + 0.25 * 3.0, 0.5)


def test_all_workers_decide_together_for_a_fiftieth_of_the_time() -> None:
    interval = after_one(iteration_s=0.5, during_s=0.5, blocked_s=0.0)
    for costs, expected in (
        ([(0.0, 0.5), (0.25, 0.5), (0.125, 0.5)], 13),  # 0.125 s in 12.5 iterations
        ([(0.0, 0.5)] * 3, LEAST),
        ([(1e6, 0.5)] * 3, MOST),
    ):
        interval.begun(100, 0.0)
        interval.decide(costs)
        assert interval.is_due(100 + expected)
