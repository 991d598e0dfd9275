"""Nets under construction: names, external blobs, copies; operators' arguments; plans."""

from __future__ import annotations

from inspect import currentframe
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, schema, workspace
from poseidon.caffe2.proto import caffe2_pb2


def outputs(net: core.Net) -> list[str]:
    return [name for op in net.Proto().op for name in op.output]


def test_blobs_that_no_net_has() -> None:
    net = core.Net("next")
    with core.NameScope("s"):
        names = [str(net.NextScopedBlob("b")) for _ in range(3)]
        assert names == ["s/b", "s/b_auto_0", "s/b_auto_1"]
    net.Relu("x", "y")
    assert str(net.NextBlob("y")) == "y_auto_0"
    assert [net.NextName(), net.NextName()] == ["next_blob_0", "next_blob_1"]


def test_external_inputs_are_what_nobody_made() -> None:
    net = core.Net("external")
    h = net.Relu("x", "h")
    net.Add([h, "b"], "y")
    assert net.external_inputs == ["x", "b"]
    with pytest.raises(ValueError, match="already contained an input named b"):
        net.AddExternalInput("b")
    with pytest.raises(ValueError, match="named c"):
        net.AddExternalInput("c", "c")
    assert [net.is_external_input(blob) for blob in (h, "b")] == [False, True]
    net.AddExternalOutput(h)
    assert net.external_outputs == ["h"]


def test_operators_and_arguments_are_added_to_a_net() -> None:
    net = core.Net("edited")
    net.Relu("x", "y")
    net.extend_ops([core.CreateOperator("Exp", ["y"], ["z"])])
    net.insert_op_at_idx(core.CreateOperator("Abs", ["x"], ["x"]), 0)
    assert [op.type for op in net.Proto().op] == ["Abs", "Relu", "Exp"]
    assert net.BlobIsDefined("z")
    net.AddArgument("enable_tracing", 1)
    assert [(arg.name, arg.i) for arg in net.Proto().arg] == [("enable_tracing", 1)]


def test_a_name_that_is_no_string() -> None:
    with pytest.raises(TypeError, match=r"expected a name or a NetDef, found 3"):
        core.Net(3)


def test_a_record_gives_its_fields_as_external_inputs() -> None:
    net = core.Net("external_record")
    record = schema.Struct(("x", schema.Scalar(np.float32)), ("y", schema.Scalar(np.int64)))
    net.AddExternalInput(record)
    assert net.external_inputs == ["x", "y"]
    with pytest.raises(AssertionError, match="named x"):
        net.AddExternalInput(record)


def test_a_clone_renames_blobs_in_the_nets_of_a_branch() -> None:
    net, branch = core.Net("choice"), core.Net("branch")
    branch.Relu(["inside"], "result")
    net.If(["condition"], ["result"], then_net=branch.Proto())
    (inner,) = net.Clone("choice_copy", blob_remap={"inside": "other"}).Proto().op[0].arg
    assert list(inner.n.op[0].input) == list(inner.n.external_input) == ["other"]
    assert list(branch.Proto().op[0].input) == ["inside"]


def test_an_operator_that_does_not_exist() -> None:
    net = core.Net("unknown")
    with pytest.raises(AttributeError, match=r"Relo is not a registered operator. Did you mean"):
        net.Relo("x")
    with pytest.raises(AttributeError, match="without a net"):
        core.BlobReference("x").Relu()


def test_calls_on_references_chain() -> None:
    net = core.Net("chained")
    net.Relu("x", "a").Tanh([], "b").Add(["x"], "c")
    assert list(net.Proto().op[2].input) == ["b", "x"]


@pytest.mark.parametrize(
    ("value", "field", "expected"),
    [
        (3, "i", 3),
        (True, "i", 1),
        (2.5, "f", 2.5),
        ("text", "s", b"text"),
        (b"\xff", "s", b"\xff"),
        (np.int64(4), "i", 4),
        (np.float32(0.5), "f", 0.5),
        ((1, 2), "ints", [1, 2]),
        ([1.0, 2.5], "floats", [1.0, 2.5]),
        (np.array([[1, 2], [3, 4]]), "ints", [1, 2, 3, 4]),
        (["a", b"b"], "strings", [b"a", b"b"]),
    ],
)
def test_arguments(value: Any, field: str, expected: Any) -> None:
    (argument,) = core.CreateOperator("Relu", "x", "y", key=value).arg
    assert argument.name == "key"
    found = getattr(argument, field)
    assert (list(found) if isinstance(expected, list) else found) == expected


@pytest.mark.parametrize("value", [[1, 2.5], object(), [object()]])
def test_what_is_no_argument_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Unknown argument type: key=key"):
        core.CreateOperator("Relu", "x", "y", key=value)


def test_arguments_that_are_none_are_left_out() -> None:
    assert [
        arg.name for arg in core.CreateOperator("Relu", "x", "y", absent=None, given=1).arg
    ] == ["given"]


def test_fields_of_an_operator() -> None:
    op = core.CreateOperator(
        "Relu", "x", "y", name="n", control_input="z", engine="E", random_seed=5, arg=[]
    )
    assert (op.name, op.engine, list(op.control_input)) == ("n", "E", ["z"])
    assert op.device_option.random_seed == 5
    for wrong in (3, ["x", 4]):
        with pytest.raises(TypeError, match="type"):
            core.CreateOperator("Relu", wrong, "y")


def test_a_clone_has_other_names() -> None:
    net = core.Net("cloned")
    net.Relu("x", "h")
    net.Tanh("h", "y")
    copy = net.Clone("copy", {"h": "g"}, update_external_list=True)
    assert [list(op.output) for op in copy.Proto().op] == [["g"], ["y"]]
    assert list(copy.Proto().external_output) == ["y"]
    assert outputs(net) == ["h", "y"]


def test_a_part_of_a_net() -> None:
    net = core.Net("whole")
    net.Relu("x", "a")
    b = net.Add(["a", "w"], "b")
    c = net.Tanh(b, "c")
    net.AddGradientOperators([c])
    part, (made,) = net.ClonePartial("part", {"a": "given"}, [c])
    assert [list(op.input) for op in part.Proto().op] == [["given", "w"], ["part/b"]]
    assert part.external_inputs == ["given", "w"]
    assert (str(made), made.Net()) == ("part/c", part)
    with pytest.raises(AssertionError, match="would generate the given input"):
        net.ClonePartial("wrong", ["x", "b"], ["a", c])


def test_appending_a_net_keeps_what_is_still_external() -> None:
    first, second = core.Net("first"), core.Net("second")
    first.Sum(["in1", "in2"], ["sum"])
    second.Sum(["in3", "in4"], ["in1"])
    second.AppendNet(first)
    assert second.external_inputs == ["in3", "in4", "in2"]
    assert len(second.Proto().op) == 2
    with pytest.raises(AssertionError, match=r"^AppendNet: expected a core\.Net"):
        second.AppendNet("first")
    with pytest.raises(AssertionError, match="expected a BlobReference"):
        second.AddExternalOutput("sum")
    with pytest.raises(AssertionError, match=rf"^nothing is not a blob of net {second.Name()}$"):
        second.AddExternalOutput(core.BlobReference("nothing"))


def test_the_line_that_made_an_operator_is_known() -> None:
    net = core.Net("lines")
    frame = currentframe()
    assert frame is not None
    net.Relu("x", "y"); line = frame.f_lineno  # noqa: E702  # fmt: skip
    net.PopulateProtoWithFileName()
    assert (
        net.Proto().op[0].name == f"{__file__}:{line}:test_the_line_that_made_an_operator_is_known"
    )


def test_ssa_and_paths() -> None:
    net = core.Net("ssa")
    net.Relu("x", "x")
    net.Tanh("x", "y")
    ssa, versions = core.get_ssa(net)
    assert ssa == [([("x", 0)], [("x", 1)]), ([("x", 1)], [("y", 1)])]
    assert versions == {"x": 1, "y": 1}
    assert core.get_undefined_blobs(ssa) == {"x"}
    assert core.get_op_ids_in_path(ssa, versions, ["x"], ["y"]) == [1]


def test_device_options() -> None:
    one, other = core.DeviceOption(0), core.DeviceOption(0)
    other.node_name = "node"
    assert core.device_option_equal(one, other)
    assert not core.device_option_equal(one, other, ignore_node_name=False)
    one.device_id = 5
    assert core.device_option_equal(one, other)
    one.device_type = 1
    assert not core.device_option_equal(one, other)


def test_a_plan_and_its_message_are_one() -> None:
    net = core.Net("planned")
    net.ConstantFill([], "c", shape=[1])
    inner = core.execution_step("inner", net, num_iter=2)
    plan = core.Plan(core.execution_step("outer", [inner], concurrent_substeps=True))
    again = core.Plan.create_from_proto(plan.Proto())
    assert [step.Name() for step in again.Steps()] == ["outer"]
    assert again.Steps()[0].Substeps()[0].Proto().num_iter == 2
    assert [n.Name() for n in again.Nets()] == ["planned_1"]
    workspace.ResetWorkspace()
    assert workspace.RunPlan(again)
    assert workspace.RunPlan(inner)
    background = workspace.RunPlanInBackground(plan)
    background._thread.join()
    assert background.is_succeeded()


def test_the_step_nets_of_recurrent_operators_move_too() -> None:
    net = core.Net("moved")
    op = core.CreateOperator("RecurrentNetwork", [], [], step_net=caffe2_pb2.NetDef(name="step"))
    net.Proto().op.add().CopyFrom(op)
    net.RunAllOnGPU(gpu_id=1)
    assert net.Proto().device_option.device_id == 1
    assert net.Proto().op[0].arg[0].n.device_option == net.Proto().device_option


@pytest.mark.parametrize("kind", ["simple", "dag"])
def test_the_error_of_an_operator_says_enforce_fail(kind: str) -> None:
    net = core.Net("fails")
    net.Proto().type = kind
    net.Proto().num_workers = 2
    net.Split("three", ["a", "b"], axis=0)
    net.Relu("three", "c")
    workspace.FeedBlob("three", np.zeros(3, dtype=np.float32))
    with pytest.raises(RuntimeError, match=r"^\[enforce fail at Split\] .*cannot be split"):
        workspace.RunNetOnce(net)


def test_a_net_prints_texts_and_blobs(capsys: pytest.CaptureFixture[str]) -> None:
    net = core.Net("talks")
    x = net.GivenTensorFill([], "x", shape=[2], values=[0.5, 2.0])
    assert net.LogInfo("x is", x) is None
    workspace.RunNetOnce(net)
    assert capsys.readouterr().err == "Tensor talks/log (): x is\nTensor x (2): 0.5,2.0\n"


def test_random_seeds_of_operators() -> None:
    net = core.Net("random")
    for _ in range(2):
        net.GaussianFill([], 1, shape=[2])
    seeds = []
    for settings in (
        {},
        {"sequence_seed": False},
        {"sequence_seed": False, "seed_on_op_def": True},
    ):
        net.set_rand_seed(7, **settings)
        seeds.append([op.device_option.random_seed for op in net.Proto().op])
    assert seeds[:2] == [[7, 8], [7, 7]] and len({7, 8, *seeds[2]}) == 4
    with pytest.raises(ValueError, match="exclude each other"):
        net.set_rand_seed(seed_on_op_def=True)
