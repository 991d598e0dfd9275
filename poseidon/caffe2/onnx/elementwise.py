"""Functions of single values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2.onnx.nodes import Node, NoForm, converts
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto

_SAME: Mapping[str, str] = {
    **{
        kind: kind
        for kind in (
            *("Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Cosh", "Erf"),
            *("Exp", "Expand", "Floor", "Log", "Mean", "Mish", "Not", "Range"),
            *("Reciprocal", "Relu", "Sigmoid", "Sign", "Sin", "Sinh", "Size"),
            *("Softplus", "Softsign", "Sqrt", "Sum", "Tan", "Tanh"),
        )
    },
    "Neg": "Negative",
    "Identity": "Copy",
    "Tile": "NumpyTile",
}
"""Nodes without attributes that an operator takes as they are."""
_PAIRS = {
    **{kind: kind for kind in ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor")},
    "Equal": "EQ",
    "Less": "LT",
    "LessOrEqual": "LE",
    "Greater": "GT",
    "GreaterOrEqual": "GE",
}
"""Functions of two inputs that broadcast as NumPy does; before version 7 as the older Caffe2."""


@converts(*_SAME)
def _same(node: Node) -> None:
    node.emit(_SAME[node.kind])


@converts(*_PAIRS)
def _pair(node: Node) -> None:
    older = node.facts.version < 7
    node.emit(
        _PAIRS[node.kind],
        broadcast=node.get("broadcast") if older else None,
        axis=node.get("axis") if older else None,
    )


@converts("Max", "Min")
def _extremes(node: Node) -> None:
    shapes = [node.facts.shapes.get(name) for name in node.inputs]
    if any(shape != shapes[0] for shape in shapes):
        raise NoForm("its inputs have different shapes")
    node.emit(node.kind)


@converts("Pow")
def _pow(node: Node) -> None:
    exponent = node.facts.constants.get(node.inputs[1])
    if exponent is not None and exponent.size == 1:
        node.emit("Pow", node.inputs[:1], exponent=float(exponent.reshape(())))
    else:
        node.emit("Pow", broadcast=node.get("broadcast"), axis=node.get("axis"))


@converts("LeakyRelu", "Elu", "ThresholdedRelu")
def _with_alpha(node: Node) -> None:
    node.emit(node.kind, alpha=float(node.get("alpha", 0.01 if node.kind == "LeakyRelu" else 1.0)))


@converts("HardSigmoid")
def _hard_sigmoid(node: Node) -> None:
    node.emit("HardSigmoid", alpha=float(node.get("alpha", 0.2)), beta=float(node.get("beta", 0.5)))


@converts("HardSwish")
def _hard_swish(node: Node) -> None:
    (x,) = node.inputs
    node.emit("Mul", [x, node.step("HardSigmoid", [x], alpha=1 / 6, beta=0.5)])


@converts("Selu")
def _selu(node: Node) -> None:
    older = node.facts.version < 6
    node.emit(
        "Selu",
        alpha=float(node.get("alpha", 1.6732 if older else 1.67326319217681884765625)),
        scale=float(node.get("gamma", 1.0507 if older else 1.05070102214813232421875)),
    )


@converts("Gelu")
def _gelu(node: Node) -> None:
    node.emit("Gelu", fast_gelu=int(node.get("approximate", "none") == "tanh"))


@converts("PRelu")
def _prelu(node: Node) -> None:
    slope = node.facts.constants.get(node.inputs[1])
    if slope is None:
        raise NoForm("its slope is computed, not constant")
    channels = node.shape()[1] if len(node.shape()) > 1 else 1
    if slope.size not in (1, channels) or (slope.ndim > 1 and slope.shape[0] != slope.size):
        raise NoForm(
            f"its slope has the shape {list(slope.shape)}, Caffe2 has one for each channel"
        )
    node.emit("PRelu", [node.inputs[0], node.constant(slope.reshape(-1), "slope")])


@converts("Clip")
def _clip(node: Node) -> None:
    least, most = node.setting("min", 1), node.setting("max", 2)
    node.emit(
        "Clip",
        node.inputs[:1],
        min=None if least is None else float(least),
        max=None if most is None else float(most),
    )


@converts("Cast")
def _cast(node: Node) -> None:
    name = node.get("to")
    if isinstance(name, int):
        name = onnx_module().TensorProto.DataType.Name(name)
    if name not in dict(TensorProto.DataType.items()):
        raise NoForm(f"Caffe2 has no type {name}")
    node.emit("Cast", to=TensorProto.DataType.Value(name))


@converts("Dropout")
def _dropout(node: Node) -> None:
    if node.setting("training_mode", 2):
        raise NoForm("it is in training mode")
    node.emit("Copy", node.inputs[:1])


@converts("Where")
def _where(node: Node) -> None:
    shapes = [node.shape(index) for index in range(3)]
    if all(shape == shapes[0] for shape in shapes):
        node.emit("Where")
        return
    if any(extent is None for shape in shapes for extent in shape):
        raise NoForm("its inputs have different shapes")
    common = np.broadcast_shapes(*(tuple(int(e or 0) for e in shape) for shape in shapes))
    size = node.constant(np.array(common, np.int64), "shape")
    node.emit("Where", [node.step("Expand", [name, size]) for name in node.inputs])
