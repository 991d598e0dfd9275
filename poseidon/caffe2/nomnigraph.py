"""A net as a graph of operators and tensors, to be changed and made a net again.

    nn = NNModule(net)
    for op in nn.operators:
        print(op.name, [tensor.name for tensor in op.inputs])
    net = nn.convertToCaffe2Proto()

Law: each output of an operator is a tensor of its own, also where blobs have one name. The inputs
and outputs of an operator have an order. Operators keep their order as far as their inputs allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from poseidon.caffe2.proto.caffe2_pb2 import NetDef, OperatorDef


class NeuralNetOperator:
    """An operator without its ends.

    Attributes:
        definition: its type and arguments.
    """

    def __init__(self, name: str) -> None:
        self.definition = OperatorDef(type=name)

    def getName(self) -> str:
        return self.definition.type


class NeuralNetData:
    """A tensor with the name of its blob."""

    def __init__(self, name: str) -> None:
        self.name = name

    def getName(self) -> str:
        return self.name


Operator, Data = NeuralNetOperator, NeuralNetData


class Node:
    """An operator or a tensor in a graph.

    Attributes:
        content: it.
        inputs: the tensors that an operator reads, or the operator that makes a tensor.
        outputs: the tensors that an operator makes, or the operators that read a tensor.
    """

    def __init__(self, content: NeuralNetOperator | NeuralNetData) -> None:
        self.content = content
        self.inputs: list[Node] = []
        self.outputs: list[Node] = []

    @property
    def name(self) -> str:
        """The type of an operator, or the name of a blob."""
        return self.content.getName()

    def getName(self) -> str:
        return self.name

    def getType(self) -> str:
        return "Operator" if self.isOperator() else "Data"

    def isOperator(self) -> bool:
        return isinstance(self.content, NeuralNetOperator)

    def isTensor(self) -> bool:
        return not self.isOperator()

    def getOperator(self) -> NeuralNetOperator:
        """Return the operator; an error for a tensor."""
        assert isinstance(self.content, NeuralNetOperator), f"{self.name} is a tensor"
        return self.content

    def getTensor(self) -> NeuralNetData:
        """Return the tensor; an error for an operator."""
        assert isinstance(self.content, NeuralNetData), f"{self.name} is an operator"
        return self.content

    def hasProducer(self) -> bool:
        """Return whether an operator makes this tensor."""
        return bool(self.inputs)

    @property
    def producer(self) -> Node:
        """The operator that makes this tensor."""
        assert self.inputs, f"no operator makes {self.name}"
        return self.inputs[0]

    @property
    def consumers(self) -> list[Node]:
        """The operators that read this tensor."""
        return self.outputs

    def getOperatorPredecessors(self) -> list[Node]:
        return [made for tensor in self.inputs for made in tensor.inputs]

    def getOperatorSuccessors(self) -> list[Node]:
        return [reader for tensor in self.outputs for reader in tensor.outputs]


class Graph:
    """Operators and tensors."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def getMutableNodes(self) -> list[Node]:
        return list(self.nodes)

    @property
    def operators(self) -> list[Node]:
        return [node for node in self.nodes if node.isOperator()]

    @property
    def tensors(self) -> list[Node]:
        return [node for node in self.nodes if node.isTensor()]

    def createNode(self, content: Any) -> Node:
        """Add an operator or a tensor without edges.

        Args:
            content: one of them, or an OperatorDef, whose inputs and outputs do not count.
        """
        if isinstance(content, OperatorDef):
            definition = OperatorDef()
            definition.CopyFrom(content)
            del definition.input[:], definition.output[:]
            content = NeuralNetOperator(content.type)
            content.definition = definition
        if not isinstance(content, NeuralNetOperator | NeuralNetData):
            raise TypeError(f"not an Operator, Data or OperatorDef: {type(content).__name__}")
        self.nodes.append(Node(content))
        return self.nodes[-1]

    def createEdge(self, tail: Node, head: Node) -> None:
        """Let an operator read a tensor, or make one, as its last input or output.

        Raises:
            ValueError: both are tensors or both operators, or the tensor is made already.
        """
        if tail.isOperator() == head.isOperator():
            raise ValueError(f"an edge from {tail.name} to {head.name} joins two nodes of one kind")
        if head.isTensor() and head.inputs:
            raise ValueError(f"{head.name} is made by {head.producer.name} already")
        tail.outputs.append(head)
        head.inputs.append(tail)

    def deleteEdge(self, tail: Node, head: Node) -> None:
        """Remove an edge."""
        tail.outputs.remove(head)
        head.inputs.remove(tail)

    def deleteNode(self, node: Node) -> None:
        """Remove a node and its edges."""
        for other in list(node.inputs):
            self.deleteEdge(other, node)
        for other in list(node.outputs):
            self.deleteEdge(node, other)
        self.nodes.remove(node)

    def __str__(self) -> str:
        """Return the graph in Graphviz's language."""
        number = {node: place for place, node in enumerate(self.nodes)}
        lines = [
            f'  n{place} [label="{node.name}", shape={"box" if node.isOperator() else "oval"}];'
            for node, place in number.items()
        ]
        lines += [f"  n{number[n]} -> n{number[other]};" for n in self.nodes for other in n.outputs]
        return "\n".join(["digraph G {", *lines, "}"])


class NNSubgraph:
    """Some nodes of a graph."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes = list(nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


class NNMatchGraph(Graph):
    """A pattern: operators by type, and tensors of any name, from the one node without inputs on.

    The outputs of a strict node must be the pattern's, in order and no others. Those of any other
    node are not looked at: a pattern ends there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._strict: set[Node] = set()

    def createNode(self, content: Any, strict: bool = False) -> Node:
        """Add a node; see the class."""
        node = super().createNode(content)
        if strict:
            self._strict.add(node)
        return node

    def found_at(self, node: Node) -> NNSubgraph | None:
        """Return the nodes of the match that begins at a node, None where there is none.

        Raises:
            ValueError: the pattern has several nodes without inputs, or none.
        """
        first = [each for each in self.nodes if not each.inputs]
        if len(first) != 1:
            raise ValueError(f"a pattern begins at one node, this one at {len(first)}")
        found: dict[Node, Node] = {}
        return NNSubgraph(found.values()) if self._fits(first[0], node, found) else None

    def _fits(self, wanted: Node, node: Node, found: dict[Node, Node]) -> bool:
        if wanted in found:
            return found[wanted] is node
        if wanted.isOperator() != node.isOperator() or (
            wanted.isOperator() and wanted.name != node.name
        ):
            return False
        found[wanted] = node
        if wanted not in self._strict:
            return True
        return len(wanted.outputs) == len(node.outputs) and all(
            self._fits(*pair, found) for pair in zip(wanted.outputs, node.outputs, strict=True)
        )


class NNModule:
    """A net as a graph."""

    def __init__(self, net: Any = None, device_map: Any = None) -> None:
        """Read a net.

        Args:
            net: a net or a NetDef; None: the graph is empty.
            device_map: kept for Caffe2's scripts; operators have their devices.
        """
        self.dataFlow = Graph()
        self._definition = NetDef()
        if net is None:
            return
        self._definition.CopyFrom(net if isinstance(net, NetDef) else net.Proto())
        latest: dict[str, Node] = {}
        for definition in self._definition.op:
            node = self.dataFlow.createNode(definition)
            for name in definition.input:
                if name not in latest:
                    latest[name] = self.dataFlow.createNode(NeuralNetData(name))
                self.createEdge(latest[name], node)
            for name in definition.output:
                latest[name] = self.dataFlow.createNode(NeuralNetData(name))
                self.createEdge(node, latest[name])

    @property
    def nodes(self) -> list[Node]:
        return self.dataFlow.getMutableNodes()

    @property
    def operators(self) -> list[Node]:
        return self.dataFlow.operators

    @property
    def tensors(self) -> list[Node]:
        return self.dataFlow.tensors

    @property
    def controlFlow(self) -> list[Node]:
        """The operators in the order in which they run.

        Raises:
            ValueError: operators need each other.
        """
        waiting, ready = list(self.operators), []
        done: set[Node] = set()
        while waiting:
            following = next(
                (n for n in waiting if done.issuperset(n.getOperatorPredecessors())), None
            )
            if following is None:
                raise ValueError(f"the operator {waiting[0].name} needs its own output")
            waiting.remove(following)
            done.add(following)
            ready.append(following)
        return ready

    def createUniqueDataNode(self, prefix: str = "_unique") -> Node:
        """Add a tensor whose name begins with `prefix`, and that no other has."""
        taken = {node.name for node in self.tensors}
        name, count = prefix, 0
        while name in taken:
            name, count = f"{prefix}_{count}", count + 1
        return self.dataFlow.createNode(NeuralNetData(name))

    def createNode(self, content: Any) -> Node:
        return self.dataFlow.createNode(content)

    def createEdge(self, tail: Node, head: Node) -> None:
        self.dataFlow.createEdge(tail, head)

    def deleteNode(self, node: Node) -> None:
        self.dataFlow.deleteNode(node)

    def deleteSubgraph(self, nodes: Iterable[Node]) -> None:
        """Remove nodes and their edges."""
        for node in list(nodes):
            self.deleteNode(node)

    def replaceAllUsesWith(self, old: Node, new: Node) -> None:
        """Let all operators that read a tensor read a different one, in the same place."""
        for reader in old.outputs:
            reader.inputs = [new if each is old else each for each in reader.inputs]
        new.outputs += old.outputs
        old.outputs = []

    def replaceProducer(self, tensor: Node, new: Node) -> None:
        """Let a different operator make a tensor."""
        if tensor.inputs:
            self.dataFlow.deleteEdge(tensor.producer, tensor)
        self.createEdge(new, tensor)

    def match(self, pattern: NNMatchGraph) -> Iterator[NNSubgraph]:
        """Yield the matches of a pattern, in the order of the nodes at which they begin."""
        for node in self.nodes:
            found = pattern.found_at(node)
            if found is not None:
                yield found

    def convertToCaffe2Proto(self, old_proto: NetDef | None = None) -> NetDef:
        """Return the net of the graph.

        Args:
            old_proto: has its name, type and external outputs; by default the net that was read.
        """
        made = NetDef()
        made.CopyFrom(old_proto or self._definition)
        del made.op[:]
        for node in self.controlFlow:
            definition = made.op.add()
            definition.CopyFrom(node.getOperator().definition)
            definition.input.extend(tensor.name for tensor in node.inputs)
            definition.output.extend(tensor.name for tensor in node.outputs)
        known = set(made.external_input)
        read = dict.fromkeys(t.name for t in self.tensors if t.outputs and not t.inputs)
        made.external_input.extend(name for name in read if name not in known)
        return made


def render(graph: object) -> None:
    """Print a graph in Graphviz's language."""
    print(graph)
