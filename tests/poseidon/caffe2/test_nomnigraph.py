"""Nets as graphs: what is read, changed and written."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from poseidon.caffe2.nomnigraph import Data, Graph, NNMatchGraph, NNModule, Operator, render
from poseidon.caffe2.proto.caffe2_pb2 import NetDef


def net() -> NetDef:
    """Return a net with an operator in place."""
    made = core.Net("name")
    made.FC(["x", "w", "b"], "y")
    made.Relu("y", "y")
    made.Scale("y", "z", scale=2.0)
    made.Proto().external_output.append("z")
    found: NetDef = made.Proto()
    return found


def test_a_net_stays_as_it_is() -> None:
    nn = NNModule(net())
    made = nn.convertToCaffe2Proto()
    wanted = NetDef()
    wanted.CopyFrom(net())
    made.name = wanted.name = "n"
    assert made == wanted
    assert [op.name for op in nn.operators] == ["FC", "Relu", "Scale"]
    assert [op.name for op in nn.controlFlow] == ["FC", "Relu", "Scale"]
    assert [tensor.name for tensor in nn.tensors] == ["x", "w", "b", "y", "y", "z"]
    assert len(nn.nodes) == 9


def test_the_neighbours_of_a_node() -> None:
    fc, relu, scale = NNModule(net()).controlFlow
    assert [tensor.name for tensor in fc.inputs] == ["x", "w", "b"]
    assert not fc.inputs[0].hasProducer() and fc.outputs[0].producer is fc
    assert fc.outputs[0].consumers == [relu] and fc.getOperatorSuccessors() == [relu]
    assert scale.getOperatorPredecessors() == [relu]
    assert (fc.getType(), fc.outputs[0].getType()) == ("Operator", "Data")
    assert fc.getOperator().getName() == "FC" and scale.outputs[0].getTensor().getName() == "z"
    with pytest.raises(AssertionError, match="x is a tensor"):
        fc.inputs[0].getOperator()


def test_an_operator_is_inserted_and_another_removed() -> None:
    nn = NNModule(net())
    fc, relu = nn.controlFlow[:2]
    inner = nn.createUniqueDataNode("y")
    sigmoid = nn.createNode(core.CreateOperator("Sigmoid", ["any"], ["where"]))
    nn.replaceAllUsesWith(relu.outputs[0], inner)
    nn.createEdge(fc.outputs[0], sigmoid)
    nn.createEdge(sigmoid, inner)
    nn.deleteSubgraph([relu, relu.outputs[0]])
    made = nn.convertToCaffe2Proto()
    assert [(op.type, *op.input, *op.output) for op in made.op] == [
        ("FC", "x", "w", "b", "y"),
        ("Sigmoid", "y", "y_0"),
        ("Scale", "y_0", "z"),
    ]
    x = np.float32([[1, -2]])
    for name, value in (("x", x), ("w", np.eye(2, dtype="float32")), ("b", np.float32([0, 1]))):
        workspace.FeedBlob(name, value)
    workspace.RunNetOnce(made)
    wanted = 2 / (1 + np.exp(-(x + np.float32([0, 1]))))
    np.testing.assert_allclose(workspace.FetchBlob("z"), wanted, rtol=1e-6)


def test_a_producer_is_replaced_and_new_inputs_are_external() -> None:
    nn = NNModule(net())
    fc = nn.controlFlow[0]
    nn.replaceAllUsesWith(fc.inputs[0], nn.createNode(Data("t")))
    test = nn.createNode(Operator("Copy"))
    nn.createEdge(fc.inputs[0], test)
    nn.replaceProducer(fc.outputs[0], test)
    nn.deleteNode(fc)
    made = nn.convertToCaffe2Proto()
    assert [op.type for op in made.op] == ["Copy", "Relu", "Scale"]
    assert list(made.op[0].input) == ["t"] and "t" in made.external_input


def test_what_is_no_graph_of_a_net() -> None:
    graph = Graph()
    x, y, op = graph.createNode(Data("x")), graph.createNode(Data("y")), Operator("Relu")
    node = graph.createNode(op)
    with pytest.raises(ValueError, match="from x to y joins two nodes of one kind"):
        graph.createEdge(x, y)
    graph.createEdge(node, y)
    with pytest.raises(ValueError, match="y is made by Relu already"):
        graph.createEdge(graph.createNode(op), y)
    with pytest.raises(TypeError, match="not an Operator, Data or OperatorDef: int"):
        graph.createNode(7)
    nn = NNModule()
    first = nn.createNode(op)
    tensor = nn.createUniqueDataNode()
    nn.createEdge(first, tensor)
    nn.createEdge(tensor, first)
    with pytest.raises(ValueError, match="the operator Relu needs its own output"):
        nn.convertToCaffe2Proto()


def test_a_graph_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    render(NNModule(net()).dataFlow)
    printed = capsys.readouterr().out
    assert printed.startswith("digraph G {\n") and 'n0 [label="FC", shape=box];' in printed
    assert printed.count("->") == 8


def chain(*nodes: tuple[Operator | Data, bool]) -> NNMatchGraph:
    """Return a pattern whose nodes follow each other, each strict or not."""
    pattern, before = NNMatchGraph(), None
    for content, strict in nodes:
        node = pattern.createNode(content, strict=strict)
        if before is not None:
            pattern.createEdge(before, node)
        before = node
    return pattern


def test_matches_of_a_pattern() -> None:
    """As in Caffe2's tutorial of nomnigraph."""
    nn = NNModule(net())
    pattern = chain((Operator("Relu"), True), (Data("*"), True), (Operator("Scale"), False))
    (match,) = nn.match(pattern)
    assert [node.name for node in match.nodes] == ["Relu", "y", "Scale"] and len(match) == 3
    assert not list(nn.match(chain((Operator("FC"), True), (Data("*"), True))))
    assert len(list(nn.match(chain((Operator("FC"), False))))) == 1
    assert not list(nn.match(chain((Operator("FC"), True))))  # it has an output
    nn.createEdge(match.nodes[1], nn.createNode(Operator("Copy")))
    assert not list(nn.match(pattern))  # two operators read y
    pattern.createNode(Operator("Relu"))
    with pytest.raises(ValueError, match="a pattern begins at one node, this one at 2"):
        list(nn.match(pattern))


def test_a_match_is_removed() -> None:
    nn = NNModule(net())
    (match,) = nn.match(chain((Operator("Scale"), True), (Data("*"), False)))
    nn.deleteSubgraph(match)
    assert [op.name for op in nn.controlFlow] == ["FC", "Relu"]
