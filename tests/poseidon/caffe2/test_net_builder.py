"""Blocks of a net builder: their nets, steps and what they compute."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.net_builder import NetBuilder, ops
from poseidon.caffe2.task import Node, Task
from tests.support.caffe2_operators import call


def run(builder: NetBuilder) -> None:
    workspace.RunPlan(core.to_execution_step(builder))


def fetch(blob: Any) -> Any:
    return workspace.FetchBlob(blob).item()


def test_nets_have_the_names_of_their_blocks() -> None:
    with NetBuilder("block_names") as builder:
        ops.Const(1)
        with ops.loop(2, name="inner"):
            ops.Const(2)
    names = [child.Name() if isinstance(child, core.Net) else child.name for child in builder.get()]
    assert names == ["block_names", "block_names/inner"]
    with pytest.raises(AssertionError, match="has been built already"):
        builder.current_net()


def test_a_loop_needs_an_end() -> None:
    with pytest.raises(AssertionError, match="requires a stop condition"):  # noqa: SIM117
        with NetBuilder(), ops.loop():
            ops.Const(1)
    assert NetBuilder.current(required=False) is None


def test_a_block_tells_whether_it_was_stopped() -> None:
    with NetBuilder() as builder:
        yes, no = ops.Const(True), ops.Const(False)
        with ops.stop_guard() as stopped:
            ops.stop_if(yes)
            ops.Const(1, blob_out="never")
        with ops.stop_guard() as ended:
            ops.stop_if(no)
            ops.Const(1, blob_out="always")
    run(builder)
    assert fetch(stopped.has_stopped()) and not fetch(ended.has_stopped())
    assert fetch("always") == 1 and workspace.blobs["always"] == 1
    with pytest.raises(RuntimeError):
        workspace.FetchBlob("never").item()


def test_blocks_around_instances_of_a_task() -> None:
    with Node("trainer"), Task(name="sums", num_instances=3) as task:
        with ops.task_init():
            mutex, total = ops.CreateMutex([], 1), ops.Const(0)
        with ops.task_instance_init():
            mine = ops.Const(0)
        with ops.loop(4) as loop:
            ops.Add([mine, loop.iter()], [mine])
        with ops.task_instance_exit():
            ops.AtomicFetchAdd([mutex, total, mine], [total, "before"])
        with ops.task_exit():
            done = ops.Mul([total, total], 1)
    workspace.RunPlan(core.Plan(task.get_step()))
    assert fetch(total) == 3 * 6 and fetch(done) == 18 * 18


def test_a_reporter_runs_once_more_at_the_end() -> None:
    with Task() as task:
        with ops.task_init():
            count = ops.CreateCounter([], 1)
        with ops.task_reporter(interval_ms=3_600_000):
            ops.CountUp([count], 1)
        ops.Const(1)
    workspace.RunPlan(core.Plan(task.get_step()))
    call("RetrieveCount", [count], ["n"])
    assert fetch("n") == 1


def test_a_group_of_tasks_is_a_step() -> None:
    with NetBuilder() as builder:
        x, results = ops.Const(2), [ops.Const(0), ops.Const(0)]
        with ops.task_group():
            for result in results:
                with Task():
                    ops.Mul([x, x], result)
        total = ops.Add(results)
    run(builder)
    assert fetch(total) == 8
