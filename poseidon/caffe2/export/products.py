"""Emitters of products, normalization of rows, reductions: FC, MatMul, Softmax, ReduceSum."""

from __future__ import annotations

import math
from collections.abc import Sequence

from poseidon.caffe.export.graph import OPERATORS, Graph, GraphBlob
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe2.export.elementwise import Blobs, Names
from poseidon.caffe2.export.trace import Op


def matrix(graph: Graph, x: GraphBlob, axis: int) -> str:
    """Return x with the dimensions from an axis on as columns, those before as rows."""
    axis = axis % len(x.shape) if axis < len(x.shape) else axis
    rows, columns = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    if len(x.shape) == 2 and axis == 1:
        return x.name
    if x.dynamic and axis:
        return graph.reshape(x.name, [-1, columns])
    return graph.reshape(x.name, [rows, columns] if not x.dynamic else [1, -1])


@OPERATORS.emits("FC", "FCTransposed")
def _fc(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, w, b = inputs
    transposed = op.definition.type == "FCTransposed"
    values = matrix(graph, x, op["axis"])
    product = graph.op(
        "Gemm",
        values,
        matrix(graph, w, op["axis_w"]),
        graph.reshape(b.name, [-1]),
        transB=int(not transposed),
    )
    if len(outputs[0].shape) == 2:
        return [product]
    return [graph.reshape(product, outputs[0].extents)]


@OPERATORS.emits("MatMul")
def _mat_mul(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    a, b = (
        matrix(graph, blob, op[f"axis_{side}"]) for blob, side in zip(inputs, "ab", strict=False)
    )
    product = graph.op("Gemm", a, b, transA=int(op["trans_a"]), transB=int(op["trans_b"]))
    return [product if len(inputs) == 2 else graph.reshape(product, outputs[0].extents)]


@OPERATORS.emits("BatchMatMul")
def _batch_mat_mul(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    names = []
    for blob, side in zip(inputs, "ab", strict=True):
        rank, turned = len(blob.shape), op[f"trans_{side}"]
        order = [*range(rank - 2), rank - 1, rank - 2]
        moved = graph.op("Transpose", blob.name, perm=order) if turned and rank > 1 else blob.name
        names.append(moved)
    return [graph.op("MatMul", *names)]


@OPERATORS.emits("Softmax")
def _softmax(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, axis = inputs[0], op["axis"] % max(len(inputs[0].shape), 1)
    if axis == len(x.shape) - 1:
        return [graph.op("Softmax", x.name, axis=axis)]
    if x.dynamic and not axis:
        raise LayerError("takes the softmax over the batch")
    rows = graph.reshape(x.name, [*x.extents[:axis], math.prod(x.shape[axis:])])
    return [graph.reshape(graph.op("Softmax", rows, axis=axis), x.extents)]


@OPERATORS.emits("LayerNorm")
def _layer_norm(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, axis = inputs[0], op["axis"] % len(inputs[0].shape)
    over = graph.integers(*range(axis, len(x.shape)))
    mean = graph.op("ReduceMean", x.name, over, keepdims=1)
    centred = graph.op("Sub", x.name, mean)
    variance = graph.op("ReduceMean", graph.op("Mul", centred, centred), over, keepdims=1)
    deviation = graph.op("Sqrt", graph.op("Add", variance, graph.floats(float(op["epsilon"]))))
    value = graph.op("Div", centred, deviation)
    if len(inputs) == 3:
        scale, bias = (graph.reshape(blob.name, list(x.shape[axis:])) for blob in inputs[1:])
        value = graph.op("Add", graph.op("Mul", value, scale), bias)
    shapes = [blob.extents for blob in outputs[1:]]
    statistics = zip((mean, deviation), shapes, strict=False)
    return [value, *(graph.reshape(each, shape) for each, shape in statistics)]


@OPERATORS.emits("ElementwiseLinear")
def _elementwise_linear(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, w, b = inputs
    rest = list(x.shape[op["axis"] :])
    scale, bias = (graph.reshape(blob.name, rest) for blob in (w, b))
    return [graph.op("Add", graph.op("Mul", x.name, scale), bias)]


@OPERATORS.emits("RowMul")
def _row_mul(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, w = inputs
    return [graph.op("Mul", x.name, graph.reshape(w.name, [-1, *[1] * (len(x.shape) - 1)]))]


@OPERATORS.emits("Normalize", "NormalizeL1")
def _normalize(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, axis = inputs[0], graph.integers(op["axis"])
    if op.definition.type == "Normalize":
        norm = graph.op("ReduceL2", x.name, axis, keepdims=1)
        return [graph.op("Div", x.name, graph.op("Max", norm, graph.floats(1e-12)))]
    norm = graph.op("ReduceL1", x.name, axis, keepdims=1)
    empty = graph.op("Equal", norm, graph.floats(0.0))
    return [graph.op("Div", x.name, graph.op("Where", empty, graph.floats(1.0), norm))]


def reduced(
    graph: Graph, kind: str, x: GraphBlob, axes: Sequence[int], *, kept: bool = False
) -> str:
    """Return x reduced over axes."""
    return graph.op(kind, x.name, graph.integers(*axes), keepdims=int(kept))


@OPERATORS.emits("ReduceSum", "ReduceMean", "ReduceMin", "ReduceMax", "ReduceL1", "ReduceL2")
def _reduce(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, rank = inputs[0], len(inputs[0].shape)
    if not rank:
        return [graph.op("Identity", x.name)]
    axes = [axis % rank for axis in op["axes"]] or list(range(rank))
    return [reduced(graph, op.definition.type, x, axes, kept=op["keepdims"])]


@OPERATORS.emits(
    *(f"Reduce{side}{kind}" for side in ("Front", "Back") for kind in ("Sum", "Mean", "Max"))
)
def _reduce_side(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if len(inputs) > 1:
        raise LayerError("has lengths")
    x, count, rank = inputs[0], op["num_reduce_dim"], len(inputs[0].shape)
    side, kind = ("Front" if "Front" in op.definition.type else "Back"), op.definition.type
    axes = range(count) if side == "Front" else range(rank - count, rank)
    return [reduced(graph, kind.replace(side, ""), x, list(axes))]


@OPERATORS.emits("ColwiseMax", "RowwiseMax")
def _max_of_matrices(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    axis = 1 if op.definition.type == "ColwiseMax" else 2
    return [reduced(graph, "ReduceMax", inputs[0], [axis])]


@OPERATORS.emits("SumElements", "SumElementsInt", "SumSqrElements", "AveragedLoss")
def _sum_elements(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, kind = inputs[0], op.definition.type
    mean = kind == "AveragedLoss" or (kind != "SumElementsInt" and op["average"])
    value = graph.op("Mul", x.name, x.name) if kind == "SumSqrElements" else x.name
    return [graph.op("ReduceMean" if mean else "ReduceSum", value, keepdims=0)]


@OPERATORS.emits("LpNorm")
def _lp_norm(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = inputs[0]
    values = graph.op("Abs", x.name) if op["p"] == 1 else graph.op("Mul", x.name, x.name)
    total = graph.op("ReduceMean" if op["average"] else "ReduceSum", values, keepdims=0)
    return [graph.reshape(total, [1])]


@OPERATORS.emits("Moments")
def _moments(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, rank, kept = inputs[0], len(inputs[0].shape), int(op["keepdims"])
    over = graph.integers(*([axis % rank for axis in op["axes"]] or range(rank)))
    centred = graph.op("Sub", x.name, graph.op("ReduceMean", x.name, over, keepdims=1))
    variance = graph.op("ReduceMean", graph.op("Mul", centred, centred), over, keepdims=kept)
    return [graph.op("ReduceMean", x.name, over, keepdims=kept), variance]
