"""The operators of ONNX that compute elementwise, products, and recurrent layers.

LSTM, GRU and RNN as Caffe2's recurrent networks, in one direction or both.

Law: sequences have one length. The gates of ONNX's weights are put into Caffe2's order: input,
forget, output and cell of an LSTM; reset, update and output of a GRU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2 import core, gru_cell, rnn_cell
from poseidon.caffe2.model_helper import ModelHelper
from poseidon.caffe2.onnx.nodes import Array, Node, NoForm, converts
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
        raise NoForm(f"its slope has the shape {list(slope.shape)}, not one for each channel")
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


@converts("MatMul")
def _matmul(node: Node) -> None:
    ranks = [len(node.facts.shapes.get(name, "..")) for name in node.inputs]
    if ranks == [1, 1]:
        node.emit("ReduceSum", [node.step("Mul", node.inputs)], axes=[0], keepdims=0)
    else:
        node.emit("BatchMatMul", broadcast=1)


@converts("Gemm")
def _gemm(node: Node) -> None:
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    transposed_a, transposed_b = int(node.get("transA", 0)), int(node.get("transB", 0))
    bias = node.facts.shapes.get(node.inputs[2]) if 2 in node else None
    width = (node.facts.shapes.get(node.inputs[1]) or [None, None])[0 if transposed_b else 1]
    if alpha == beta == 1 and not transposed_a and bias is not None and bias == [width]:
        node.emit("FC" if transposed_b else "FCTransposed")
        return
    factors: dict[str, Any] = {"trans_a": transposed_a, "trans_b": transposed_b}
    if 2 not in node and alpha == 1:
        node.emit("MatMul", node.inputs[:2], **factors)
        return
    value = node.step("MatMul", node.inputs[:2], **factors)
    if 2 not in node:
        node.emit("Scale", [value], scale=alpha)
        return
    value = value if alpha == 1 else node.step("Scale", [value], scale=alpha)
    added = node.inputs[2] if beta == 1 else node.step("Scale", [node.inputs[2]], scale=beta)
    node.emit("Add", [value, added])


@converts("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
@converts("ReduceSumSquare", "ReduceLogSum")
def _reduce(node: Node) -> None:
    axes, keep = node.setting("axes", 1), int(node.get("keepdims", 1))
    if not axes and node.get("noop_with_empty_axes"):
        node.emit("Copy", node.inputs[:1])
    elif node.kind == "ReduceSumSquare":
        node.emit("ReduceSum", [node.step("Sqr", node.inputs[:1])], axes=axes, keepdims=keep)
    elif node.kind == "ReduceLogSum":
        node.emit("Log", [node.step("ReduceSum", node.inputs[:1], axes=axes, keepdims=keep)])
    else:
        node.emit(node.kind, node.inputs[:1], axes=axes, keepdims=keep)


@converts("ArgMax", "ArgMin")
def _arg_extreme(node: Node) -> None:
    node.allow(select_last_index=0)
    node.emit(node.kind, axis=node.axis(0), keepdims=int(node.get("keepdims", 1)))


@converts("TopK")
def _top_k(node: Node) -> None:
    node.allow(largest=1)
    count = node.setting("k", 1)
    count = count[0] if isinstance(count, list) else count
    node.emit("TopK", node.inputs[:1], node.outputs, k=int(count), axis=node.axis(-1))


_ORDERS = {"LSTM": (0, 2, 1, 3), "GRU": (1, 0, 2), "RNN": (0,)}
"""The gates of ONNX's weights in Caffe2's order."""
_GRU_GATES = ("reset_gate_t", "update_gate_t", "output_gate_t")


@converts("LSTM", "GRU", "RNN")
def _recurrent(node: Node) -> None:
    node.allow(layout=0, clip=None, input_forget=0)
    direction = node.get("direction", "forward")
    if 4 in node:
        raise NoForm("Caffe2 has no padding of shorter sequences")
    if 7 in node:
        raise NoForm("Caffe2 has no peepholes")
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    made = [_direction(node, place, last) for place, last in enumerate(backward)]
    every = [
        node.step("ExpandDims", [hidden], dims=[1]) for hidden, *_ in made
    ]  # T x N x H as T x 1 x N x H
    finals = list(zip(*(rest for _, *rest in made), strict=True))
    for name, parts, axis in zip(node.outputs, [every, *finals], (1, 0, 0), strict=False):
        if name and len(parts) == 1:
            node.emit("Copy", parts, [name])
        elif name:
            node.emit("Concat", parts, [name, node.rest()], axis=axis)


def _direction(node: Node, place: int, backward: bool) -> list[str]:
    """Add one direction; return all hidden states and the last ones (hidden, and cell)."""
    scope = node.facts.fresh(f"{node.outputs[0] or node.outputs[1]}/{node.kind}")
    weights, recurrence, bias = (
        node.facts.constants.get(node.inputs[index]) if index in node else None
        for index in (1, 2, 3)
    )
    if weights is None or recurrence is None or (3 in node and bias is None):
        raise NoForm("its weights are computed, not constant")
    gates, inputs = weights.shape[1:]
    size = recurrence.shape[2]
    biases = np.zeros(2 * gates, np.float32) if bias is None else bias[place]
    count = 2 if node.kind == "LSTM" else 1
    x = node.inputs[0]
    lengths = _lengths(node) if backward else ""
    if backward:
        x = node.step("ReversePackedSegs", [x, lengths])
    firsts = [_first(node, 5 + index, place, size, len(weights)) for index in range(count)]
    model = ModelHelper(name=scope)
    with core.NameScope("", reset=True):
        found = _cell(node)(
            model,
            core.BlobReference(x),
            None,
            [core.BlobReference(first) for first in firsts],
            inputs,
            size,
            scope=scope,
            forward_only=True,
        )
    for name, value in _parameters(node.kind, weights[place], recurrence[place], biases).items():
        node.facts.constants[f"{scope}/{name}"] = value
    node.operators += list(model.net.Proto().op)
    hidden, *rest = map(str, found)
    if backward:
        hidden = node.step("ReversePackedSegs", [hidden, lengths])
    return [hidden, *rest[::2]]


def _cell(node: Node) -> Any:
    """Return the function that adds the network."""
    given = [each.decode().lower() for each in node.get("activations", [])]
    usual = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}
    wanted = usual[node.kind]
    ones = [given[at : at + len(wanted)] for at in range(0, len(given), len(wanted))] or [wanted]
    if (
        node.kind == "RNN"
        and all(one == ones[0] for one in ones)
        and ones[0][0] in ("tanh", "relu")
    ):
        return lambda *args, **kwargs: rnn_cell.BasicRNN(*args, activation=ones[0][0], **kwargs)
    if any(one != wanted for one in ones):
        raise NoForm(f"Caffe2 has no {node.kind} with the activations {', '.join(given)}")
    if node.kind == "LSTM":
        return rnn_cell.LSTM
    before = bool(node.get("linear_before_reset", 0))
    return lambda *args, **kwargs: gru_cell.GRU(*args, linear_before_reset=before, **kwargs)


def _parameters(kind: str, weights: Array, recurrence: Array, bias: Array) -> dict[str, Array]:
    """Return the parameters of a cell by their names in its scope."""
    order = _ORDERS[kind]

    def parts(value: Array) -> list[Array]:
        gates = np.split(value, len(order))
        return [gates[index] for index in order]

    of_input, of_state = np.split(bias, 2)
    made = {"i2h_w": np.concatenate(parts(weights)), "i2h_b": np.concatenate(parts(of_input))}
    if kind == "GRU":
        for name, w, b in zip(_GRU_GATES, parts(recurrence), parts(of_state), strict=True):
            made |= {f"{name}_w": w, f"{name}_b": b}
        return made
    return made | {
        "gates_t_w": np.concatenate(parts(recurrence)),
        "gates_t_b": np.concatenate(parts(of_state)),
    }


def _extent(node: Node, axis: int) -> str:
    """Return the extent of the sequence along an axis, as a vector of one number."""
    shape = node.step("Shape", node.inputs[:1])
    return node.step("Slice", [shape], starts=[axis], ends=[axis + 1])


def _lengths(node: Node) -> str:
    """Return the lengths of all sequences, which are equal: int32."""
    tiled = node.step("Tile", [_extent(node, 0), _extent(node, 1)], axis=0)
    return node.step("Cast", [tiled], to=core.DataType.INT32)


def _first(node: Node, index: int, place: int, size: int, directions: int) -> str:
    """Return the first state of a direction, 1 x N x H: an input, or zeros."""
    if index in node:
        if directions == 1:
            return node.inputs[index]
        return node.step("Slice", [node.inputs[index]], starts=[place], ends=[place + 1])
    ends = [node.constant(np.array([value], np.int64), "extent") for value in (1, size)]
    shape = node.facts.fresh(f"{node.outputs[0]}/shape")
    node.emit("Concat", [ends[0], _extent(node, 1), ends[1]], [shape, node.rest()], axis=0)
    return node.step("ConstantFill", [shape], input_as_shape=1, value=0.0)
