"""Where a loop of a script takes memory snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import poseidon
from poseidon.engine.memory import ScriptMemory, Snapshot
from poseidon.engine.packed import unpacked
from poseidon.engine.worker_context import WorkerContext
from poseidon.torch.distribute import join
from poseidon.torch.tensors import DistributeOptions


def memory(
    *,
    holds: bool = True,
    rewind: int = -1,
    resumes: bool = True,
    on_begin: Callable[[], None] = lambda: None,
) -> ScriptMemory:
    made = ScriptMemory(holds=holds, rewind=rewind, every=3, newest=None, on_begin=on_begin)
    made.resumes = resumes
    return made


def take(memory: ScriptMemory, content: bytes = b"state") -> None:
    """Take one where it is due."""
    memory.between(lambda: content, lambda payload: (payload, payload), regroups=False)


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
                for _ in group.loader(data, 10):  # an evaluation
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
