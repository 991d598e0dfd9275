"""An ONNX graph under construction.

Law: a value is a name. Every axis has a fixed extent, but for the first one of a value that holds one item for each image: it
is the dynamic batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import UsageError

OPSET = 18
"""The version of ONNX's operators: the first in which Resize and Split have all that is needed here."""
IR_VERSION = 8
BATCH = "N"
"""The name of the dynamic axis."""

Shape = tuple[int, ...]


def onnx_module() -> ModuleType:
    """Return the package `onnx`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise UsageError("to write ONNX, install the extra: pip install 'poseidon[export]'") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A blob of a net in a graph.

    Attributes:
        name: of the value; empty for a top that has none yet.
        shape: its extents, with the batch of the definition.
        dynamic: whether its first axis is the dynamic batch, or the number of regions.
        known: whether its shape is known before the net runs.
    """

    name: str = ""
    shape: Shape
    dynamic: bool
    known: bool = True

    @property
    def extents(self) -> list[int]:
        """The shape for Reshape: -1 for the batch."""
        return [-1, *self.shape[1:]] if self.dynamic else list(self.shape)


class Graph:
    """Collects nodes and constants. Values are named `<scope>/<number>` until they are renamed."""

    def __init__(self) -> None:
        self._onnx = onnx_module()
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._constants: dict[tuple[str, Shape, bytes], str] = {}
        self._inputs: list[Any] = []
        self._taken: set[str] = set()
        self._count = 0
        self.scope = ""
        """The prefix of new values: the name of the layer."""

    def input(self, name: str, shape: Shape, *, dynamic: bool) -> str:
        """Add an input of float32."""
        self._taken.add(name)
        self._inputs.append(self._value_info(name, shape, dynamic))
        return name

    def constant(self, array: NDArray[Any], name: str = "") -> str:
        """Return a constant; one that exists already if it has the same values.

        Args:
            array: float32, int64 or bool.
            name: of a parameter; empty: a name is made.
        """
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self._free(name or self._next())
            self._initializers[name] = self._onnx.numpy_helper.from_array(array, name)
        return self._constants[key]

    def floats(self, *values: float) -> str:
        """Return a constant of float32: a scalar for one value."""
        return self.constant(np.array(values[0] if len(values) == 1 else values, np.float32))

    def integers(self, *values: int) -> str:
        """Return a constant vector of int64."""
        return self.constant(np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output, and return that."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node, and return its outputs."""
        names = [self._free(self._next()) for _ in range(outputs)]
        node = self._onnx.helper.make_node(kind, list(inputs), names, name=names[0], **attributes)
        self._nodes.append(node)
        return names

    def reshape(self, value: str, extents: Sequence[int]) -> str:
        """Return a value in another shape; one extent may be -1."""
        return self.op("Reshape", value, self.integers(*extents))

    def slice(self, value: str, axis: int, start: int, stop: int) -> str:
        """Return the part of a value from `start` to before `stop` along an axis."""
        return self.op("Slice", value, self.integers(start), self.integers(stop), self.integers(axis))

    def rename(self, value: str, name: str) -> str:
        """Give the output of a node a name, if that is free and the value is no input or constant. Return its name."""
        if name in self._taken or value in self._initializers or any(value == i.name for i in self._inputs):
            return value
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, each in enumerate(names):
                    if each == value:
                        names[index] = name
        self._taken.add(name)
        return name

    def model(self, name: str, outputs: Sequence[Blob]) -> Any:
        """Return the checked model.

        Args:
            name: of the graph.
            outputs: values that nodes have made, by the names that they have for the user.
        """
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes,
            name or "net",
            self._inputs,
            [self._value_info(b.name, b.shape, b.dynamic, known=b.known) for b in outputs],
            initializer=[self._initializers[key] for key in self._used()],
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(
            graph, opset_imports=[opset], producer_name="poseidon", ir_version=IR_VERSION
        )
        self._onnx.checker.check_model(model, full_check=True)
        return model

    def _used(self) -> list[str]:
        read = {name for node in self._nodes for name in node.input}
        return [name for name in self._initializers if name in read]

    def _value_info(self, name: str, shape: Shape, dynamic: bool, *, known: bool = True) -> Any:
        extents: list[int | str | None] = [BATCH, *shape[1:]] if dynamic else list(shape)
        if not known:
            extents = [None] * len(shape)
        return self._onnx.helper.make_tensor_value_info(name, self._onnx.TensorProto.FLOAT, extents)

    def _next(self) -> str:
        self._count += 1
        return f"{self.scope}/{self._count}"

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


Emitter = Callable[[Graph, Any, list[Blob], list[Blob]], Sequence[str]]
"""Adds the nodes of one layer: (graph, layer after `setup`, bottoms, tops without names). Returns the value of each top."""

_EMITTERS: dict[str, Emitter] = {}


def emits(*types: str) -> Callable[[Emitter], Emitter]:
    """Register the emitter of layer types."""

    def register(emitter: Emitter) -> Emitter:
        for kind in types:
            _EMITTERS[kind] = emitter
        return emitter

    return register


def emitter_of(kind: str) -> Emitter | None:
    """Return the emitter of a layer type; None where ONNX has no form of it."""
    return _EMITTERS.get(kind)
