"""Emitters of Caffe2's elementwise operators: activations, arithmetic, comparisons, types."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from poseidon.caffe.export.graph import OPERATORS, Graph, GraphBlob, element_type
from poseidon.caffe.export.pointwise import scaled
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe2.export.trace import Op
from poseidon.caffe2.operators.numeric.functions import data_type
from poseidon.caffe2.runtime.values import TORCH_OF

Names = list[str]
Blobs = list[GraphBlob]

PLAIN = {
    **{
        name: name
        for name in ("Relu", "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Abs", "Ceil", "Floor")
    },
    **{name: name for name in ("Cos", "Sin", "Tan", "Acos", "Asin", "Atan", "Cosh", "Sinh", "Erf")},
    **{name: name for name in ("Reciprocal", "Sign", "Softplus", "Softsign", "Not")},
    "Negative": "Neg",
    **dict.fromkeys(
        ("Copy", "Alias", "AliasWithName", "StopGradient", "NegateGradient", "NanCheck"), "Identity"
    ),
    **dict.fromkeys(("EnsureDense", "EnsureCPUOutput", "CopyCPUToGPU", "CopyGPUToCPU"), "Identity"),
    **dict.fromkeys(("CopyFromCPUInput", "CopyOnDeviceLike"), "Identity"),
}
"""ONNX's operator for operators of one input without arguments."""
BINARY = {
    **{name: name for name in ("Add", "Sub", "Mul", "Div", "And", "Or", "Xor")},
    **{name: name for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")},
    "LT": "Less",
    "LE": "LessOrEqual",
    "GT": "Greater",
    "GE": "GreaterOrEqual",
    "EQ": "Equal",
}


def number(graph: Graph, value: float, like: GraphBlob) -> str:
    """Return a constant scalar of the type of a blob."""
    return graph.constant(np.array(value, np.dtype(like.dtype)))


def cast(graph: Graph, value: str, dtype: str) -> str:
    """Return a value as a type that numpy names."""
    return graph.op("Cast", value, to=element_type(dtype))


@OPERATORS.emits(*PLAIN)
def _plain(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    return [graph.op(PLAIN[op.definition.type], inputs[0].name)]


@OPERATORS.emits("Cbrt")
def _cbrt(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    (x,) = inputs
    root = graph.op("Pow", graph.op("Abs", x.name), number(graph, 1 / 3, x))
    return [graph.op("Mul", graph.op("Sign", x.name), root)]


@OPERATORS.emits("Logit")
def _logit(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    (x,), eps = inputs, float(op["eps"])
    inner = _limited(graph, x, eps, 1 - eps)
    rest = graph.op("Sub", number(graph, 1, x), inner)
    return [graph.op("Log", graph.op("Div", inner, rest))]


def _limited(graph: Graph, x: GraphBlob, low: float | None, high: float | None) -> str:
    value = x.name
    if high is not None:
        value = graph.op("Min", value, number(graph, high, x))
    return value if low is None else graph.op("Max", value, number(graph, low, x))


@OPERATORS.emits("PRelu")
def _prelu(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, slope = inputs
    if math.prod(slope.shape) == 1:
        return [graph.op("PRelu", x.name, graph.reshape(slope.name, [1]))]
    if op["order"] == "NHWC":
        return [graph.op("PRelu", x.name, slope.name)]
    return [graph.op("PRelu", x.name, graph.reshape(slope.name, [-1, *[1] * (len(x.shape) - 2)]))]


def _square(graph: Graph, op: Op, x: GraphBlob) -> str:
    return graph.op("Mul", x.name, x.name)


def _root(graph: Graph, op: Op, x: GraphBlob) -> str:
    return graph.op("Reciprocal", graph.op("Sqrt", x.name))


def _with_alpha(graph: Graph, op: Op, x: GraphBlob) -> str:
    return graph.op(op.definition.type, x.name, alpha=float(op["alpha"]))


ONE: dict[str, Callable[[Graph, Op, GraphBlob], str]] = {
    "Sqr": _square,
    "Cube": lambda graph, op, x: graph.op("Mul", _square(graph, op, x), x.name),
    "Rsqrt": _root,
    "RSqrt": _root,
    "Log1p": lambda graph, op, x: graph.op("Log", graph.op("Add", x.name, number(graph, 1, x))),
    "Clip": lambda graph, op, x: _limited(graph, x, op["min"], op["max"]),
    "ReluN": lambda graph, op, x: _limited(graph, x, 0.0, op["n"]),
    "Scale": lambda graph, op, x: graph.op("Mul", x.name, number(graph, op["scale"], x)),
    "LeakyRelu": _with_alpha,
    "Elu": _with_alpha,
    "ThresholdedRelu": _with_alpha,
    "Selu": lambda graph, op, x: graph.op(
        "Selu", x.name, alpha=float(op["alpha"]), gamma=float(op["scale"])
    ),
    "HardSigmoid": lambda graph, op, x: graph.op(
        "HardSigmoid", x.name, alpha=float(op["alpha"]), beta=float(op["beta"])
    ),
    "Swish": lambda graph, op, x: graph.op("Mul", x.name, graph.op("Sigmoid", x.name)),
    "ReplaceNaN": lambda graph, op, x: graph.op(
        "Where", graph.op("IsNaN", x.name), number(graph, op["value"], x), x.name
    ),
    "Mod": lambda graph, op, x: graph.op(  # fmod has the sign of x
        "Mod", x.name, number(graph, op["divisor"], x), fmod=int(not op["sign_follow_divisor"])
    ),
}
"""Operators of one input, by what they are in ONNX."""


@OPERATORS.emits(*ONE)
def _one(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    return [ONE[op.definition.type](graph, op, inputs[0])]


@OPERATORS.emits("Gelu")
def _gelu(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = inputs[0].name
    if op["fast_gelu"]:
        cubed = graph.op("Mul", graph.op("Mul", x, x), x)
        inner = graph.op("Add", x, scaled(graph, cubed, 0.044715))
        share = graph.op("Tanh", scaled(graph, inner, math.sqrt(2 / math.pi)))
    else:
        share = graph.op("Erf", scaled(graph, x, math.sqrt(0.5)))
    return [graph.op("Mul", scaled(graph, x, 0.5), graph.op("Add", share, graph.floats(1.0)))]


@OPERATORS.emits("Glu")
def _glu(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, axis = inputs[0], op["dim"] % len(inputs[0].shape)
    half = x.shape[axis] // 2
    first, second = (graph.slice(x.name, axis, at, at + half) for at in (0, half))
    return [graph.op("Mul", first, graph.op("Sigmoid", second))]


@OPERATORS.emits("Dropout")
def _dropout(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if not op["is_test"]:
        raise LayerError("draws at random: set is_test")
    return [graph.op("Identity", inputs[0].name)]


@OPERATORS.emits("Cast", "FloatToHalf", "HalfToFloat")
def _cast(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    dtype = outputs[0].dtype
    if op.definition.type == "Cast":
        to = op["to"]
        dtype = str(TORCH_OF[data_type(to.s if to.HasField("s") else to.i)]).removeprefix("torch.")
    return [cast(graph, inputs[0].name, dtype)]


def aligned(graph: Graph, op: Op, a: GraphBlob, b: GraphBlob) -> str:
    """Return the second operand in a shape that broadcasts, by Caffe2's older rule."""
    axis = op["axis"]
    if op["broadcast"] and op["axis_str"]:
        axis = op["order"].index(op["axis_str"])
    missing = len(a.shape) - axis - len(b.shape)
    if op["broadcast"] and axis >= 0 and missing:
        return graph.reshape(b.name, [*b.extents, *[1] * missing])
    return b.name


@OPERATORS.emits(*BINARY, "NE")
def _binary(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    a, b = inputs
    second = aligned(graph, op, a, b)
    if op.definition.type == "NE":
        return [graph.op("Not", graph.op("Equal", a.name, second))]
    return [graph.op(BINARY[op.definition.type], a.name, second)]


@OPERATORS.emits("Pow")
def _pow(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if len(inputs) == 2:
        return [graph.op("Pow", inputs[0].name, aligned(graph, op, *inputs))]
    return [graph.op("Pow", inputs[0].name, number(graph, op["exponent"] or 0.0, inputs[0]))]


@OPERATORS.emits("Sum", "SumInt", "Mean", "Max", "Min")
def _several(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    kind = {"Max": "Max", "Min": "Min"}.get(op.definition.type, "Add")
    value = inputs[0].name
    for other in inputs[1:]:
        value = graph.op(kind, value, other.name)
    if op.definition.type == "Mean":
        value = graph.op("Div", value, number(graph, len(inputs), inputs[0]))
    return [value]


@OPERATORS.emits("Where")
def _where(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    condition, x, y = inputs
    chosen = condition.name
    if op["broadcast_on_rows"]:
        chosen = graph.reshape(chosen, [-1, *[1] * (len(x.shape) - 1)])
    return [graph.op("Where", chosen, x.name, y.name)]


@OPERATORS.emits("LSTMUnit")
def _lstm_unit(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    hidden, cell, gates = inputs[:3]
    i, f, o, g = graph.ops("Split", gates.name, outputs=4, axis=-1, num_outputs=4)
    forget = graph.op("Sigmoid", scaled(graph, f, 1.0, float(op["forget_bias"])))
    kept = graph.op("Mul", forget, cell.name)
    added = graph.op("Mul", graph.op("Sigmoid", i), graph.op("Tanh", g))
    new = graph.op("Add", kept, added)
    shown = graph.op("Mul", graph.op("Sigmoid", o), graph.op("Tanh", new))
    return [_of_running(graph, op, inputs[3:], *pair) for pair in ((shown, hidden), (new, cell))]


@OPERATORS.emits("GRUUnit")
def _gru_unit(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    hidden, gates = inputs[:2]
    _, update, new = graph.ops("Split", gates.name, outputs=3, axis=-1, num_outputs=3)
    update, new = graph.op("Sigmoid", update), graph.op("Tanh", new)
    rest = graph.op("Mul", new, graph.op("Sub", graph.floats(1.0), update))
    state = graph.op("Add", graph.op("Mul", hidden.name, update), rest)
    return [_of_running(graph, op, inputs[2:], state, hidden)]


def _of_running(graph: Graph, op: Op, rest: Blobs, new: str, old: GraphBlob) -> str:
    """Return the new state of the sequences that are not over, for others the old one or 0."""
    if not op["sequence_lengths"]:
        return new
    lengths, step = rest
    running = graph.op(
        "Less",
        cast(graph, graph.reshape(step.name, [1]), "int64"),
        cast(graph, lengths.name, "int64"),
    )
    other = graph.floats(0.0) if op["drop_states"] else old.name
    return graph.op("Where", graph.reshape(running, [-1, 1]), new, other)
