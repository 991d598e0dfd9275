"""Orders of operators, and sharing by an order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from poseidon.caffe2 import brew, core, memonger, model_helper, workspace
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.chains import nested_blobs


def diamond(*names: str) -> Any:
    """Two paths of two operators from `names[0]` to a sum."""
    x, y, z, u, v = names
    net = core.Net("diamond")
    for read, made in (("data", x), (x, y), (x, z), (y, u), (z, v)):
        net.Copy(read, made)
    net.Add([u, v], "out")
    return net.Proto()


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (("a", "b", "c", "d", "e"), True),
        (("x", "y", "z", "y", "z"), True),
        (("x", "y", "y", "u", "v"), False),
        (("x", "y", "z", "u", "u"), False),
    ],
)
def test_equality_does_not_look_at_names(names: tuple[str, ...], same: bool) -> None:
    assert memonger.verify_graph_equality(diamond("x", "y", "z", "u", "v"), diamond(*names)) is same


def test_other_operators_are_not_equal() -> None:
    one, other = core.Net("n"), core.Net("n")
    one.Copy("a", "b")
    assert not memonger.verify_graph_equality(one.Proto(), other.Proto())
    other.Copy("a", "b", engine="CUDNN")
    assert not memonger.verify_graph_equality(one.Proto(), other.Proto())


def test_operators_in_place() -> None:
    one, other = core.Net("n"), core.Net("n")
    one.Relu("a", "a")
    other.Relu("a", "b")
    assert memonger.verify_inplace_blobs(one.Proto(), one.Proto())
    assert not memonger.verify_inplace_blobs(one.Proto(), other.Proto())


@pytest.mark.parametrize("as_text", [False, True])
def test_step_nets_are_renamed_too(as_text: bool) -> None:
    step = caffe2_pb2.NetDef(name="step", external_input=["h", "w"], external_output=["o"])
    step.op.add(type="Mul", input=["h", "w"], output=["o"])
    net = caffe2_pb2.NetDef(name="rnn")
    op = net.op.add(type="RecurrentNetwork", input=["w", "x"], output=["y"])
    argument = op.arg.add(name="step_net")
    if as_text:
        argument.s = str(step).encode()
    else:
        argument.n.CopyFrom(step)
    assert nested_blobs(net.op) == {"h", "w", "o"}
    memonger.apply_assignments(net, {"w": "m", "o": "n", "y": "z"})
    inner = text_format.Parse(argument.s.decode(), caffe2_pb2.NetDef()) if as_text else argument.n
    assert (list(inner.op[0].input), list(inner.op[0].output)) == (["h", "m"], ["n"])
    assert list(inner.external_input) == ["h", "m"]
    assert (list(op.input), list(op.output)) == (["m", "x"], ["z"])
    assert {a.name: a.s for a in op.arg if a.name.endswith(".rename")} == {
        "w.rename": b"m",
        "y.rename": b"z",
    }


def net_of(*operators: tuple[str, str]) -> Any:
    net = core.Net("order")
    for read, made in operators:
        net.Copy(read, made) if " " not in read else net.Add(read.split(), made)
    return net.Proto().op


def test_the_graph_of_operators_in_place() -> None:
    graph = memonger.compute_interference_graph(net_of(("b", "b"), ("b", "b"), ("b", "b")))
    assert graph.edges() == [(0, 1), (0, 2), (1, 2)]
    assert graph.successors(0) == [1, 2] and graph.predecessors(2) == [0, 1]
    assert graph.deps(0, 2) == {"b"} and len(graph) == 3 and graph.nodes[1]["op"].type == "Copy"


@pytest.mark.parametrize(
    ("operators", "last_first", "longest_first"),
    [
        ([("a", "b")], [0], [0]),
        ([("w", "v"), ("data v", "c"), ("u", "u"), ("c u", "d")], [2, 0, 1, 3], [0, 1, 2, 3]),
        (
            [("w", "v"), ("data v", "c"), ("u", "u"), ("c u", "d"), ("e", "f"), ("f", "g")],
            [4, 5, 2, 0, 1, 3],
            [0, 1, 2, 3, 4, 5],
        ),
    ],
)
def test_orders(operators: Any, last_first: list[int], longest_first: list[int]) -> None:
    graph = memonger.compute_interference_graph(net_of(*operators))
    assert memonger.topological_sort_traversal(graph) == last_first
    assert memonger.topological_sort_traversal_longest_path(graph) == longest_first


@pytest.mark.parametrize("algorithm", list(memonger.AssignmentAlgorithm))
@pytest.mark.parametrize(
    "order", [memonger.topological_sort_traversal, memonger.topological_sort_traversal_longest_path]
)
def test_results_stay_and_memory_falls(algorithm: Any, order: Any) -> None:
    model = model_helper.ModelHelper(name="m")
    blob: Any = "data"
    for layer in range(1, 4):
        blob = brew.fc(model, blob, f"fc{layer}", 5, 5)
    soft = blob.Relu([], blob).Softmax([], "pred")
    soft.LabelCrossEntropy(["label"], ["xent"]).AveragedLoss([], "loss")
    gradient = str(model.AddGradientOperators(["loss"])["fc1_w"])
    static = [name for op in model.param_init_net.Proto().op for name in op.output]
    static += ["data", "label", "loss", gradient]
    workspace.RunNetOnce(model.param_init_net)
    workspace.FeedBlob("data", np.random.RandomState(0).randn(3, 5).astype(np.float32))
    workspace.FeedBlob("label", np.int32([0, 1, 4]))
    workspace.RunNetOnce(model.net)
    expected = [workspace.FetchBlob(name).tolist() for name in ("loss", gradient)]
    for sizes in (None, memonger.collect_blob_sizes(model.Proto())):
        found = memonger.optimize_interference(model.Proto(), static, order, sizes, algorithm)
        workspace.ResetBlob(gradient)
        workspace.RunNetOnce(found.net)
        assert [workspace.FetchBlob(name).tolist() for name in ("loss", gradient)] == expected
        statistics = memonger.compute_statistics(found.assignments)
        assert statistics.optimized_nbytes < statistics.baseline_nbytes
        assert not set(found.blob_assignments).intersection(static)
