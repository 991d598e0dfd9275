"""Blocks of a net builder, tasks, jobs; their text and their analysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, net_printer, workspace
from poseidon.caffe2.checkpoint import Job
from poseidon.caffe2.net_builder import NetBuilder, ops
from poseidon.caffe2.task import Cluster, Node, Task, TaskGroup, WorkspaceType, final_output


def run(builder: NetBuilder) -> None:
    plan = core.Plan("plan")
    plan.AddStep(core.to_execution_step(builder))
    workspace.RunPlan(plan)


def fetch(blob: Any) -> Any:
    return workspace.FetchBlob(blob).item()


def job_of(*builders: Any) -> Job:
    with Job() as job:
        with job.init_group, Task():
            ops.Const(1, blob_out="shared")
        for build in builders:
            with Task():
                build()
    return job


def test_nets_of_a_block_run_in_order() -> None:
    with NetBuilder("order") as builder:
        x = ops.Const(2.0)
        ops.net(name="second")
        y = ops.Mul([x, x])
    run(builder)
    assert fetch(y) == 4


def test_loops_and_conditions() -> None:
    with NetBuilder("loops") as builder:
        total, large, small, rest = (ops.Const(0) for _ in range(4))
        with ops.loop(10) as outer:
            tens = ops.Mul([outer.iter(), ops.Const(10)])
            with ops.loop(outer.iter()) as inner:
                value = ops.Add([tens, inner.iter()])
                with ops.If(ops.GE([value, ops.Const(80)])) as branch:
                    ops.Add([large, value], [large])
                with branch.Elif(ops.GE([value, ops.Const(50)])) as branch:
                    ops.Add([small, value], [small])
                with branch.Else():
                    ops.Add([rest, value], [rest])
                ops.Add([total, value], [total])
    run(builder)
    values = [10 * i + j for i in range(10) for j in range(i)]
    expected = [
        sum(values),
        sum(v for v in values if v >= 80),
        sum(v for v in values if 50 <= v < 80),
    ]
    assert [fetch(blob) for blob in (total, large, small)] == expected
    assert fetch(rest) == sum(v for v in values if v < 50)


def test_what_runs_around_a_task() -> None:
    with Task(name="around") as task:
        with ops.task_init():
            one = ops.Const(1)
        two = ops.Add([one, one])
        with ops.task_init():
            three = ops.Const(3)
        total = ops.Add([two, three])
        with ops.task_exit():
            seven = ops.Add([total, one])
        ops.Add([total, one], [total])
        final_output([two, seven])
    workspace.RunPlan(core.Plan(task.get_step()))
    assert [fetch(name) for name in task.output_names()] == [2, 7]


def test_tasks_are_grouped_by_node() -> None:
    with Cluster() as cluster, TaskGroup() as group:
        for name in ("a", "b", "a"):
            with Node(name), Task():
                ops.Const(1)
    assert cluster.nodes() == group.used_nodes() == ["a", "b"]
    assert [task.node for task in group.tasks_by_node().tasks()] == ["a", "b"]


def test_a_job_is_printed() -> None:
    text = net_printer.to_string(job_of(lambda: ops.Add(["shared", "shared"], "twice")))
    assert "job.epoch_group" in text
    assert "twice = Add(shared, shared)" in text


def test_a_whole_job_is_analyzed() -> None:
    net_printer.analyze(job_of(lambda: ops.Add(["shared", "distributed_ctx_init_x"], "twice")))


@pytest.mark.parametrize(
    ("builders", "message"),
    [
        ([lambda: ops.Add(["shared", "nobody"], "y")], "Blob undefined: nobody"),
        ([lambda: ops.Const(1, blob_out="y")] * 2, "created by multiple parallel steps: y"),
    ],
)
def test_a_mistake_of_a_job_is_found(builders: list[Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        net_printer.analyze(job_of(*builders))


def test_a_blob_that_tasks_of_the_common_workspace_make_is_made_twice() -> None:
    with Job() as job:
        with Task(num_instances=2, workspace_type=WorkspaceType.GLOBAL):
            with ops.task_instance_init():
                one = ops.Const(1)
            ops.LogInfo("one is", one)
        for _ in range(2):
            with Task(workspace_type=WorkspaceType.GLOBAL):
                ops.Add([ops.Const(1), ops.Const(2)], "y")
    assert "with job.epoch_group" in net_printer.to_string(job)
    with pytest.raises(AssertionError, match="created by multiple parallel steps: y"):
        net_printer.analyze(job)


def test_a_net_that_prints_its_operators(capsys: pytest.CaptureFixture[str]) -> None:
    net = core.Net("silent")
    workspace.FeedBlob("x", np.array([3.0], np.float32))
    x = net.AddExternalInput("x")
    net.Scale(net.Negative(x, "y"), "z", scale=2.0)
    made = net_printer.debug_net(net)
    assert made.external_inputs == [x]
    workspace.RunNetOnce(made)
    assert fetch("z") == -6
    lines = capsys.readouterr().err.splitlines()
    said = [line.partition(": ")[2] for line in lines]
    assert said == ["y = Negative(x)", "z = Scale(y, scale=2.0)"]


def test_a_scope_that_all_blobs_share_is_written_once() -> None:
    net = core.Net("scoped")
    net.Add(["s/t/a", "s/t/b"], "s/t/c", axis=1)
    assert "s/t/: c = Add(a, b, axis=1)" in net_printer.to_string(net, factor_prefixes=True)


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="int cannot be printed or analyzed"):
        net_printer.to_string(3)
