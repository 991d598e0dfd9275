"""One node of an ONNX graph as operators of Caffe2.

Law: settings that newer versions of ONNX's operators take as inputs must be constants; the two
forms are read alike, so a model of any version may be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef
from poseidon.caffe2.utils import MakeArgument

Array = NDArray[Any]


class NoForm(Exception):
    """A node has no form in Caffe2; the text says why."""


@dataclass(slots=True)
class Facts:
    """What is known about a graph.

    Attributes:
        version: of ONNX's operators.
        constants: values that no input decides, by name.
        shapes: extents by name; None for one that is not known.
        taken: names of all values.
        read: names of the values that nodes read, and of the outputs.
    """

    version: int
    constants: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, list[int | None]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        """Return a name that no value has."""
        count = 0
        while (made := f"{name}__{count}") in self.taken:
            count += 1
        self.taken.add(made)
        return made


class Node:
    """A node, and the operators that it becomes."""

    def __init__(self, proto: Any, facts: Facts) -> None:
        get = onnx_module().helper.get_attribute_value
        self.kind: str = proto.op_type
        self.attributes: dict[str, Any] = {each.name: get(each) for each in proto.attribute}
        self.inputs: list[str] = list(proto.input)
        self.outputs: list[str] = list(proto.output)
        self.facts = facts
        self.operators: list[OperatorDef] = []

    def __contains__(self, index: int) -> bool:
        """Return whether an input is given."""
        return index < len(self.inputs) and bool(self.inputs[index])

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute; texts as `str`."""
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def setting(self, name: str, index: int, default: Any = None) -> Any:
        """Return an attribute, or the constant that newer versions take as an input.

        Raises:
            NoForm: the input is not a constant.
        """
        if name in self.attributes or index not in self:
            return self.get(name, default)
        value = self.facts.constants.get(self.inputs[index])
        if value is None:
            raise NoForm(f"its {name} is computed, not constant")
        return value.tolist()

    def shape(self, index: int = 0) -> list[int | None]:
        """Return the extents of an input.

        Raises:
            NoForm: not even their number is known.
        """
        found = self.facts.shapes.get(self.inputs[index])
        if found is None:
            raise NoForm(f"the shape of its input {self.inputs[index]} is not known")
        return found

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, counted from the first where the rank is known."""
        axis = int(self.get("axis", default))
        known = self.facts.shapes.get(self.inputs[0])
        return axis + len(known) if axis < 0 and known is not None else axis

    def allow(self, **legal: Any) -> None:
        """Raise NoForm for an attribute that is given with a different value than this one."""
        for name, value in legal.items():
            given = self.get(name, value)
            if given != value:
                raise NoForm(f"Caffe2 has no {name}={given}")

    def constant(self, value: Array, name: str) -> str:
        """Return the name of a new constant."""
        made = self.facts.fresh(f"{self.outputs[0]}/{name}")
        self.facts.constants[made] = value
        return made

    def emit(
        self,
        kind: str,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        **arguments: Any,
    ) -> str:
        """Add an operator, and return its first output; by default it has the node's ends."""
        made = OperatorDef(
            type=kind,
            input=[name for name in self.inputs if name] if inputs is None else inputs,
            output=self.outputs[:1] if outputs is None else outputs,
            arg=[MakeArgument(name, v) for name, v in arguments.items() if v is not None],
        )
        self.operators.append(made)
        return made.output[0]

    def step(self, kind: str, inputs: Sequence[str], **arguments: Any) -> str:
        """Add an operator whose output goes to a later one, and return that output."""
        return self.emit(kind, inputs, [self.facts.fresh(f"{self.outputs[0]}/{kind}")], **arguments)

    def rest(self) -> str:
        """Return a name for an output that none reads."""
        return self.facts.fresh(f"{self.outputs[0]}/rest")


Converter = Callable[[Node], object]
CONVERTERS: dict[str, Converter] = {}
"""Converters by the type of a node."""


def converts(*kinds: str) -> Callable[[Converter], Converter]:
    """Register the converter of types."""

    def register(converter: Converter) -> Converter:
        CONVERTERS.update(dict.fromkeys(kinds, converter))
        return converter

    return register


_SEVERAL = ("Split", "TopK", "LSTM", "GRU", "RNN")
"""Nodes with several outputs."""


def convert(proto: Any, facts: Facts) -> list[OperatorDef]:
    """Return a node's operators.

    Raises:
        NoForm: it has no form in Caffe2.
    """
    node = Node(proto, facts)
    if proto.domain == "org.pytorch._caffe2":  # Caffe2's own operators, as torch exported them
        attributes = {name: node.get(name) for name in node.attributes}
        node.emit(node.kind, outputs=node.outputs, **attributes)
        return node.operators
    converter = CONVERTERS.get(node.kind)
    if proto.domain not in ("", "ai.onnx") or converter is None:
        raise NoForm("")
    spare = [name for name in node.outputs[1:] if name in facts.read]
    if spare and node.kind not in _SEVERAL:
        raise NoForm(f"Caffe2 has no output {spare[0]}")
    converter(node)
    return node.operators
