"""Emitters of operators that join, cut, gather or fill, and of those on rows."""

from __future__ import annotations

import math

import numpy as np

from poseidon.caffe.export.graph import OPERATORS, Graph, GraphBlob
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe2.export.elementwise import Blobs, Names, cast
from poseidon.caffe2.export.trace import Op


def _place(op: Op, rank: int) -> int:
    """Return the axis of Concat and Split: by default the channels."""
    axis = op["order"].index("C") if op["axis"] is None else op["axis"]
    return int(axis % rank)


@OPERATORS.emits("Concat", "DepthConcat")
def _concat(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    rank = len(outputs[0].shape)
    axis, values = _place(op, rank), [blob.name for blob in inputs]
    if op["add_axis"]:
        values = [graph.op("Unsqueeze", value, graph.integers(axis)) for value in values]
    sizes = [1 if op["add_axis"] else blob.shape[axis] for blob in inputs]
    made = [graph.op("Concat", *values, axis=axis)]
    if axis or not outputs[0].dynamic:
        made.append(graph.constant(np.array(sizes, np.int32)))
    return made


@OPERATORS.emits("Split", "DepthSplit")
def _split(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, count = inputs[0], len(op.outputs)
    axis = _place(op, len(x.shape))
    if x.dynamic and axis == 0:
        raise LayerError("cuts the batch")
    sizes = [blob.shape[axis] for blob in outputs]
    if op["add_axis"]:
        sizes = [1] * count
    parts = graph.ops("Split", x.name, graph.integers(*sizes), outputs=count, axis=axis)
    if op["add_axis"]:
        parts = [graph.op("Squeeze", part, graph.integers(axis)) for part in parts]
    return parts


@OPERATORS.emits("Reshape")
def _reshape(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = inputs[0]
    if len(inputs) > 1:
        wanted = cast(graph, inputs[1].name, "int64")
    else:
        wanted = (
            graph.integers(*op["shape"]) if op["shape"] else graph.constant(np.zeros(0, np.int64))
        )
    return [graph.op("Reshape", x.name, wanted), graph.op("Shape", x.name)]


@OPERATORS.emits("ResizeLike")
def _resize_like(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    return [graph.op("Reshape", inputs[0].name, graph.op("Shape", inputs[1].name))]


@OPERATORS.emits("Flatten", "FlattenToVec", "MergeDim", "PrependDim", "ExpandDims", "Squeeze")
def _same_values(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    return [graph.reshape(inputs[0].name, outputs[0].extents)]


@OPERATORS.emits("Transpose")
def _transpose(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    order = op["axes"] or list(range(len(inputs[0].shape)))[::-1]
    return [graph.op("Transpose", inputs[0].name, perm=order)]


@OPERATORS.emits("Tile")
def _tile(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    rank, known = len(inputs[0].shape), [graph.known(blob.name) for blob in inputs[1:]]
    if any(value is None for value in known):
        raise LayerError("computes how often it repeats")
    tiles, axis = (
        [int(v.item()) for v in known if v is not None] + [op["tiles"], op["axis"]][len(known) :]
    )[:2]
    repeats = [1] * rank
    repeats[axis % rank] = tiles
    return [graph.op("Tile", inputs[0].name, graph.integers(*repeats))]


@OPERATORS.emits("NumpyTile")
def _numpy_tile(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    return [graph.op("Tile", inputs[0].name, cast(graph, inputs[1].name, "int64"))]


@OPERATORS.emits("Expand")
def _expand(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    shape = graph.op("Abs", cast(graph, inputs[1].name, "int64"))  # -1 keeps an extent, as 1 does
    return [graph.op("Expand", inputs[0].name, shape)]


@OPERATORS.emits("Slice")
def _slice(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, limits = inputs[0], [op["starts"], op["ends"]]
    if len(inputs) > 1:
        known = [graph.known(blob.name) for blob in inputs[1:]]
        if any(value is None for value in known):
            raise LayerError("computes where it cuts")
        limits = [value.tolist() for value in known if value is not None]
    value = x.name
    for axis, (start, end) in enumerate(zip(*limits, strict=False)):
        size = x.shape[axis]
        if (start, end) == (0, -1):
            continue
        if x.dynamic and axis == 0 and min(start, end) < 0:
            raise LayerError("cuts the batch from its end")
        both = (start, end)
        first, behind = (n + size + 1 if n < 0 else min(n, size) for n in both)
        value = graph.slice(value, axis, first, behind)
    return [value]


@OPERATORS.emits("Shape")
def _shape(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, axes = inputs[0], op["axes"]
    if not x.dynamic:
        shape = [x.shape[axis] for axis in axes] if axes else x.shape
        return [graph.constant(np.array(shape, np.int64))]
    whole = graph.op("Shape", x.name)
    return [graph.op("Gather", whole, graph.integers(*axes)) if axes else whole]


@OPERATORS.emits("Size")
def _size(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if not inputs[0].dynamic:
        return [graph.constant(np.array(math.prod(inputs[0].shape), np.int64))]
    return [graph.op("Size", inputs[0].name)]


@OPERATORS.emits("Gather", "BatchGather")
def _gather(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, index = inputs
    if op["match_outer"]:
        raise LayerError("matches outer dimensions (match_outer)")
    axis = 1 if op.definition.type == "BatchGather" else op["axis"]
    chosen = index.name if index.dtype in ("int32", "int64") else cast(graph, index.name, "int64")
    return [graph.op("Gather", x.name, chosen, axis=axis)]


@OPERATORS.emits("OneHot")
def _one_hot(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    index, size = (cast(graph, blob.name, "int64") for blob in inputs)
    values = graph.constant(np.array([0, 1], np.float32))
    return [graph.op("OneHot", index, graph.reshape(size, [1]), values)]


@OPERATORS.emits("ConstantFill")
def _constant_fill(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if len(inputs) > 1:
        raise LayerError("computes its value")
    if op["input_as_shape"]:
        shape = cast(graph, inputs[0].name, "int64")
    elif not inputs[0].dynamic:
        shape = graph.integers(*inputs[0].shape)
    else:
        shape = graph.op("Shape", inputs[0].name)
    if op["extra_shape"]:
        shape = graph.op("Concat", shape, graph.integers(*op["extra_shape"]), axis=0)
    given = op["value"]
    number = 0 if given is None else given.f if given.HasField("f") else given.i
    fill = graph.tensor(np.array([number], np.dtype(outputs[0].dtype)))
    return [graph.op("ConstantOfShape", shape, value=fill)]


@OPERATORS.emits("ArgMax", "ArgMin", "RowWiseArgMax")
def _arg_max(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    rows = op.definition.type == "RowWiseArgMax"
    kind = "ArgMin" if op.definition.type == "ArgMin" else "ArgMax"
    axis, kept = (1, 1) if rows else (op["axis"], int(op["keepdims"]))
    return [graph.op(kind, inputs[0].name, axis=axis, keepdims=kept)]


@OPERATORS.emits("TopK")
def _top_k(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    axis, x = op["axis"] % len(inputs[0].shape), inputs[0]
    if op["k"] > x.shape[axis]:
        raise LayerError(f"takes {op['k']} of {x.shape[axis]} values")
    if len(outputs) > 2 and len(op.definition.output) > 2:
        raise LayerError("gives indices in the flattened tensor")
    return graph.ops("TopK", x.name, graph.integers(op["k"]), outputs=2, axis=axis)


SMALLEST_NORM = 1e-12


def _row_sums(graph: Graph, value: str, x: GraphBlob) -> str:
    """Return the sum of each row; a vector has rows of one element."""
    if len(x.shape) < 2:
        return graph.reshape(value, [-1])
    return graph.op("ReduceSum", value, graph.integers(*range(1, len(x.shape))), keepdims=0)


@OPERATORS.emits("DotProduct")
def _dot_product(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, y = inputs
    return [_row_sums(graph, graph.op("Mul", x.name, y.name), x)]


@OPERATORS.emits("SquaredL2Distance", "L1Distance")
def _distance(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, y = inputs
    difference = graph.op("Sub", x.name, y.name)
    if op.definition.type == "L1Distance":
        return [_row_sums(graph, graph.op("Abs", difference), x)]
    total = _row_sums(graph, graph.op("Mul", difference, difference), x)
    return [graph.op("Mul", total, graph.floats(0.5))]


@OPERATORS.emits("CosineSimilarity")
def _cosine(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, y = inputs
    norms = []
    for blob in inputs:
        norm = graph.op("Sqrt", _row_sums(graph, graph.op("Mul", blob.name, blob.name), blob))
        norms.append(graph.op("Max", norm, graph.floats(SMALLEST_NORM)))
    product = _row_sums(graph, graph.op("Mul", x.name, y.name), x)
    return [graph.op("Div", product, graph.op("Mul", *norms))]


@OPERATORS.emits("LengthsSum", "LengthsMean")
def _by_lengths(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, lengths = inputs
    mean = op.definition.type == "LengthsMean"
    return [_segments(graph, x.name, len(x.shape), lengths.name, mean=mean)]


@OPERATORS.emits("SparseLengthsSum", "SparseLengthsMean", "SparseLengthsWeightedSum")
def _sparse_by_lengths(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, *weights, index, lengths = inputs
    rank = len(x.shape)
    rows = graph.op("Gather", x.name, cast(graph, index.name, "int64"), axis=0)
    if weights:
        rows = graph.op("Mul", rows, graph.reshape(weights[0].name, [-1, *[1] * (rank - 1)]))
    mean = op.definition.type == "SparseLengthsMean"
    return [_segments(graph, rows, rank, lengths.name, mean=mean)]


def _segments(graph: Graph, rows: str, rank: int, lengths: str, *, mean: bool) -> str:
    """Return the rows' sum or mean by segment: a matrix of zeros and ones times the rows."""
    counts = cast(graph, lengths, "int64")
    ends = graph.op("CumSum", counts, graph.integers(0))
    starts = graph.op("Sub", ends, counts)
    shape = graph.op("Shape", rows)
    zero, one = (graph.constant(np.array(value, np.int64)) for value in (0, 1))
    total = graph.op("Squeeze", graph.slice(shape, 0, 0, 1), graph.integers(0))
    places = graph.op("Range", zero, total, one)
    columns = graph.integers(1)
    behind = graph.op("GreaterOrEqual", places, graph.op("Unsqueeze", starts, columns))
    before = graph.op("Less", places, graph.op("Unsqueeze", ends, columns))
    member = cast(graph, graph.op("And", behind, before), "float32")
    flat = rows
    if rank != 2:
        width = graph.integers(-1) if rank > 2 else graph.integers(1)
        size = graph.op("Concat", graph.slice(shape, 0, 0, 1), width, axis=0)
        flat = graph.op("Reshape", rows, size)
    value = graph.op("MatMul", member, flat)
    if mean:
        count = cast(graph, graph.op("Max", counts, graph.integers(1)), "float32")
        value = graph.op("Div", value, graph.op("Unsqueeze", count, columns))
    if rank == 2:
        return value
    if rank == 1:
        return graph.reshape(value, [-1])
    rest = graph.slice(shape, 0, 1, rank)
    return graph.op("Reshape", value, graph.op("Concat", graph.integers(-1), rest, axis=0))
