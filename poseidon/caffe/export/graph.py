"""An ONNX graph under construction.

Law: a value is a name. Every axis has a fixed extent, but for the first one of a value that holds
one item for each image: it is the dynamic batch.
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
"""The version of ONNX's operators: the first in which Resize and Split have all that is needed
here.
"""
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
        raise UsageError(
            "to write ONNX, install the extra: pip install 'poseidon[export]'"
        ) from error


def element_type(dtype: str) -> int:
    """Return the number that ONNX has for a type of numpy."""
    return int(onnx_module().helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


TYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The types that `--input=NAME:TYPE:N,C,H,W` may give an input."""


def typed_name(name: str) -> tuple[str, str]:
    """Return the name and the type of an input.

    >>> typed_name("words:int64"), typed_name("data")
    (('words', 'int64'), ('data', ''))
    """
    before, _, dtype = name.rpartition(":")
    return (before, dtype) if before and dtype in TYPES else (name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBlob:
    """A blob of a net in a graph.

    Attributes:
        name: of the value; empty for a top that has none yet.
        shape: its extents, with the batch of the definition.
        dynamic: whether its first axis is the dynamic batch, or the number of regions.
        known: whether its shape is known before the net runs.
        dtype: the type of its values, as numpy names it.
    """

    name: str = ""
    shape: Shape
    dynamic: bool
    known: bool = True
    dtype: str = "float32"

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
        self._arrays: dict[str, NDArray[Any]] = {}
        self._constants: dict[tuple[str, Shape, bytes], str] = {}
        self._inputs: list[Any] = []
        self._taken: set[str] = set()
        self._count = 0
        self.scope = ""
        """The prefix of new values: the name of the layer."""

    def input(self, name: str, shape: Shape, *, dynamic: bool, dtype: str = "float32") -> str:
        """Add an input."""
        self._taken.add(name)
        self._inputs.append(
            self._value_info(GraphBlob(name=name, shape=shape, dynamic=dynamic, dtype=dtype))
        )
        return name

    def constant(self, array: NDArray[Any], name: str = "") -> str:
        """Return a constant; one that exists already if it has the same values.

        Args:
            array: numbers or truth values.
            name: of a parameter; empty: a name is made.
        """
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self._free(name or self._next())
            self._initializers[name] = self._onnx.numpy_helper.from_array(array, name)
            self._arrays[name] = array
        return self._constants[key]

    def tensor(self, array: NDArray[Any]) -> Any:
        """Return a tensor for an attribute of a node."""
        return self._onnx.numpy_helper.from_array(array)

    def known(self, value: str) -> NDArray[Any] | None:
        """Return the array of a constant, None for any other value."""
        return self._arrays.get(value)

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
        """Return a value in a different shape; one extent may be -1."""
        return self.op("Reshape", value, self.integers(*extents))

    def slice(self, value: str, axis: int, start: int, stop: int) -> str:
        """Return the part of a value from `start` to before `stop` along an axis."""
        return self.op(
            "Slice", value, self.integers(start), self.integers(stop), self.integers(axis)
        )

    def rename(self, value: str, name: str) -> str:
        """Give a value a name, if that is free and the value is the output of a node.

        Return its name.
        """
        if (
            name in self._taken
            or value in self._initializers
            or any(value == i.name for i in self._inputs)
        ):
            return value
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, each in enumerate(names):
                    if each == value:
                        names[index] = name
        self._taken.add(name)
        return name

    def model(self, name: str, outputs: Sequence[GraphBlob]) -> Any:
        """Return the checked model.

        Args:
            outputs: values that nodes have made, by the names that they have for the user.
        """
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes,
            name or "net",
            self._inputs,
            [self._value_info(blob) for blob in outputs],
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

    def _value_info(self, blob: GraphBlob) -> Any:
        extents: list[int | str | None] = (
            [BATCH, *blob.shape[1:]] if blob.dynamic else list(blob.shape)
        )
        if not blob.known:
            extents = [None] * len(blob.shape)
        return self._onnx.helper.make_tensor_value_info(
            blob.name, element_type(blob.dtype), extents
        )

    def _next(self) -> str:
        self._count += 1
        return f"{self.scope}/{self._count}"

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        inputs: the blobs that the caller passes.
        outputs: the blobs that the model returns.
        fixed: why the batch is not dynamic; empty where it is.
        absent: outputs of the net that are left out, since they need inputs that are not given.
    """

    model: Any
    inputs: tuple[GraphBlob, ...]
    outputs: tuple[GraphBlob, ...]
    fixed: str
    absent: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return inputs, outputs, the version of the operators and what is fixed or left out,
        for one line.
        """
        shown = [
            ", ".join(f"{blob.name} {shape_text(blob)}" for blob in blobs)
            for blobs in (self.inputs, self.outputs)
        ]
        line = f"opset {OPSET}; inputs: {shown[0]}; outputs: {shown[1]}"
        line += f"; the batch is fixed: {self.fixed}" if self.fixed else ""
        return line + left_out(self.absent)


def left_out(absent: Sequence[str]) -> str:
    """Return the end of a line about an export: the outputs that it lacks."""
    return f"; left out: {', '.join(absent)} (they need inputs without --input)" if absent else ""


def shape_text(blob: GraphBlob) -> str:
    """Return the extents of a blob, as in Nx3x6x6."""
    if not blob.known:
        return "x".join("?" for _ in blob.shape)
    return "x".join(
        ["N" if blob.dynamic else str(e) for e in blob.shape[:1]] + [str(e) for e in blob.shape[1:]]
    )


Emitter = Callable[[Graph, Any, list[GraphBlob], list[GraphBlob]], Sequence[str]]
"""Adds the nodes of one layer or operator: (graph, layer after `setup`, bottoms, tops
without names). Returns the value of each top."""


class Emitters(dict[str, Emitter]):
    """Emitters by the type of a layer or operator."""

    def emits(self, *types: str) -> Callable[[Emitter], Emitter]:
        """Register the emitter of types."""

        def register(emitter: Emitter) -> Emitter:
            self.update(dict.fromkeys(types, emitter))
            return emitter

        return register


LAYERS = Emitters()
"""The emitters of Caffe's layers; a type without one has no form in ONNX."""
OPERATORS = Emitters()
"""The emitters of Caffe2's operators."""
