"""Plans: repeated, concurrent, stopped, reporting steps, steps with workspaces of their own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace


@pytest.fixture(autouse=True)
def fresh() -> None:
    workspace.FeedBlob("n", np.zeros(1, dtype=np.int64))


def net_of(function: Any, name: str = "python") -> core.Net:
    net = core.Net(name)
    net.Python(lambda inputs, outputs: function())([], [])
    return net


def counting(until: int | None = None) -> core.Net:
    """A net that counts in the blob n, and sets the blob `stop` at a number."""

    def count(inputs: list[Any], outputs: list[Any]) -> None:
        number = inputs[0].data + 1
        outputs[0].feed(number)
        outputs[1].feed(np.array([number[0] == until]))

    net = core.Net("counting")
    net.Python(count)(["n"], ["n", "stop"])
    return net


def n() -> int:
    return int(workspace.FetchBlob("n")[0])


def test_a_step_is_repeated() -> None:
    workspace.RunPlan(core.execution_step("s", counting(), num_iter=4))
    assert n() == 4


def test_a_blob_ends_the_iterations() -> None:
    step = core.execution_step("s", counting(until=6), should_stop_blob=core.BlobReference("stop"))
    workspace.RunPlan(step)
    assert n() == 6


def test_what_runs_only_once() -> None:
    """A stop blob that stays false ends no step; `only_once` does, in each run of the step."""
    never = core.BlobReference("stop")
    once = core.execution_step("once", counting(), should_stop_blob=never, only_once=True)
    workspace.RunPlan(core.execution_step("s", [once], num_iter=3))
    assert n() == 3


def test_steps_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)
    steps = [core.execution_step(f"s{index}", net_of(both.wait)) for index in range(2)]
    workspace.RunPlan(core.execution_step("both", steps, concurrent_substeps=True))


def test_copies_of_a_step_run_at_the_same_time() -> None:
    both = threading.Barrier(3, timeout=20)
    step = core.execution_step("s", net_of(both.wait), num_concurrent_instances=3)
    workspace.RunPlan(core.execution_step("outer", step))


def test_an_error_of_one_step_ends_the_others() -> None:
    def fails() -> None:
        raise KeyError("on purpose")

    endless = core.execution_step(
        "endless", counting(), should_stop_blob=core.BlobReference("stop")
    )
    failing = core.execution_step("failing", net_of(fails))
    with pytest.raises(KeyError, match="on purpose"):
        workspace.RunPlan(core.execution_step("both", [endless, failing], concurrent_substeps=True))


def test_a_report_runs_at_the_end_too() -> None:
    reports: list[int] = []
    report = net_of(lambda: reports.append(n()), "report")
    workspace.RunPlan(
        core.execution_step("s", counting(), num_iter=2, report_net=report, report_interval=60)
    )
    assert reports == [2]


def test_each_copy_of_a_step_has_a_workspace_of_its_own() -> None:
    net, last = core.Net("inner"), core.Net("last")
    net.ConstantFill([], "inside", shape=[1])
    net.Copy("n", "made")
    last.Add(["inside", "inside"], "read")
    step = core.execution_step("s", net, create_workspace=True, num_concurrent_instances=2)
    workspace.RunPlan(core.execution_step("outer", step))
    assert workspace.Blobs() == ["n"]
    with pytest.raises(
        RuntimeError, match=r"non-existing input blob: inside|Source for input inside"
    ):
        workspace.RunPlan(core.execution_step("both", [step, core.execution_step("l", last)]))


def test_a_net_may_read_what_an_earlier_step_makes() -> None:
    makes, reads = core.Net("makes"), core.Net("reads")
    makes.ConstantFill([], "made", shape=[1], value=2.0)
    reads.Copy("made", "copy")
    plan = core.Plan("plan")
    plan.AddNets([reads, makes])
    plan.AddStep(core.execution_step("first", makes))
    plan.AddStep(core.execution_step("second", reads))
    workspace.RunPlan(plan)
    assert workspace.FetchBlob("copy").tolist() == [2]


def test_a_net_that_is_not_there() -> None:
    step = core.ExecutionStep("s", "nobody")
    with pytest.raises(RuntimeError, match="Network nobody not found"):
        workspace.RunPlan(step)


def test_a_step_that_runs_every_so_often_ends_with_the_others() -> None:
    reached = threading.Event()
    often = core.execution_step("often", net_of(reached.set), run_every_ms=1)
    waiting = core.execution_step("waiting", net_of(lambda: reached.wait(20)))
    workspace.RunPlan(core.execution_step("both", [often, waiting], concurrent_substeps=True))
    assert reached.is_set()


def test_a_step_returns_itself_where_something_is_added() -> None:
    outer, inner = core.ExecutionStep("outer"), core.ExecutionStep("inner")
    assert inner.AddNet(core.Net("added")) is inner
    assert outer.AddSubstep(inner) is outer
