"""Tasks and groups: names, order, what runs around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, schema
from poseidon.caffe2.net_builder import ops
from poseidon.caffe2.task import (
    Node,
    SetupNets,
    Task,
    TaskGroup,
    TaskOutput,
    TaskOutputList,
    WorkspaceType,
    final_output,
    get_setup_nets,
)


def test_names_of_tasks() -> None:
    with TaskGroup() as group, Node("n"):
        for name in (None, "t", None):
            with Task(name=name):
                ops.Const(1)
    assert [task.name for task in group.tasks()] == ["n/task", "n/t", "n/task:1"]


def test_tasks_are_in_the_order_of_their_ends() -> None:
    with TaskGroup() as group:
        with Task(name="outer"):
            ops.Const(1)
            Task(step=core.Net("given"), name="inner")
        assert group.num_registered_tasks() == 2
    assert [task.name for task in group.tasks()] == ["local/inner", "local/outer"]
    with pytest.raises(AssertionError, match="already used"):
        group.add(Task())


def test_tasks_of_a_group_have_one_type_of_workspace() -> None:
    with TaskGroup(WorkspaceType.GLOBAL) as group:
        Task(workspace_type=WorkspaceType.PRIVATE)
    with pytest.raises(AssertionError, match="different types of workspace"):
        group.tasks()


class Attribute:
    """Adds an operator before, and returns a net for after."""

    def setup(self, net: core.Net) -> None:
        net.Const(1, blob_out="made")

    def exit(self, net: core.Net) -> core.Net:
        return core.Net("after")


def test_attributes_add_operators_or_nets_once() -> None:
    net = core.Net("with_attributes")
    for attribute in (Attribute(), SetupNets([core.Net("before")])):
        net.add_attribute("key", attribute)
    before, after = get_setup_nets("key", [net], None)
    assert [op.output[0] for op in before[0].Proto().op] == ["made"]
    assert len(before) == 2 and [each.Name().partition("_")[0] for each in after] == ["after"]
    assert get_setup_nets("key", [net], None) == ([], [])


def test_an_attribute_of_a_wrong_kind_is_refused() -> None:
    net = core.Net("wrong")
    net.add_attribute("key", SetupNets(init_nets="text"))
    with pytest.raises(TypeError, match="expected a net, a step or a list"):
        get_setup_nets("key", [net], None)


def test_a_group_becomes_one_task_of_each_node() -> None:
    with TaskGroup() as group:
        for node in ("a", "b", "a"):
            with Node(node), Task():
                final_output(ops.Const(1))
    a, b = group.tasks_by_node().tasks()
    assert (a.node, len(a.outputs()), b.node, len(b.outputs())) == ("a", 2, "b", 1)
    assert group.tasks_by_node().tasks() == [a, b]
    with pytest.raises(AssertionError, match="multiple times"):
        group.tasks_by_node(lambda node: node * 2)


def test_a_task_without_outputs_gets_a_zero_after_its_nets() -> None:
    with Task(name="silent") as silent:
        ops.Const(1)
    with Task(name="loud") as loud:
        final_output(ops.Const(1))
    nets = core.Plan(silent.get_step()).Nets()
    assert [net.Proto().op[0].type for net in nets] == ["GivenTensorInt64Fill", "ConstantFill"]
    assert silent.outputs()[0].names == [nets[1].Proto().op[0].output[0]]
    assert len(core.Plan(loud.get_step()).Nets()) == len(loud.outputs()) == 1


@pytest.mark.parametrize(
    ("names", "values", "expected"),
    [("x", [3], 3), (["x"], [3], [3]), (["x", "y"], [3, 4], [3, 4])],
)
def test_outputs_have_the_form_in_which_they_were_asked_for(
    names: Any, values: Any, expected: Any
) -> None:
    output = TaskOutput(names)
    with pytest.raises(AssertionError, match="not set yet"):
        output.get()
    TaskOutputList([output]).set_values(values, lambda value: value + 1)
    assert output.get() == expected
    assert np.array_equal(output.fetch(), np.array(expected) + 1)


def test_an_output_can_be_a_record() -> None:
    net = core.Net("record")
    record = schema.NewRecord(net, schema.Struct(("a", np.int32), ("b", np.float32)))
    output = TaskOutput(record)
    output.set([np.array(1), np.array(2)])
    assert output.get().b() == 2
