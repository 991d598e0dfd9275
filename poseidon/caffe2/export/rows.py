"""Emitters of Caffe2's operators on pairs of rows and on segments of rows: distances, sums by
lengths, embeddings.
"""

from __future__ import annotations

import numpy as np

from poseidon.caffe.export.graph import OPERATORS, Graph, GraphBlob
from poseidon.caffe2.export.elementwise import Names, cast
from poseidon.caffe2.export.trace import Op

SMALLEST_NORM = 1e-12


def _row_sums(graph: Graph, value: str, x: GraphBlob) -> str:
    """Return the sum of each row; a vector has rows of one element."""
    if len(x.shape) < 2:
        return graph.reshape(value, [-1])
    return graph.op("ReduceSum", value, graph.integers(*range(1, len(x.shape))), keepdims=0)


@OPERATORS.emits("DotProduct")
def _dot_product(graph: Graph, op: Op, inputs: list[GraphBlob], outputs: list[GraphBlob]) -> Names:
    x, y = inputs
    return [_row_sums(graph, graph.op("Mul", x.name, y.name), x)]


@OPERATORS.emits("SquaredL2Distance", "L1Distance")
def _distance(graph: Graph, op: Op, inputs: list[GraphBlob], outputs: list[GraphBlob]) -> Names:
    x, y = inputs
    difference = graph.op("Sub", x.name, y.name)
    if op.definition.type == "L1Distance":
        return [_row_sums(graph, graph.op("Abs", difference), x)]
    total = _row_sums(graph, graph.op("Mul", difference, difference), x)
    return [graph.op("Mul", total, graph.floats(0.5))]


@OPERATORS.emits("CosineSimilarity")
def _cosine(graph: Graph, op: Op, inputs: list[GraphBlob], outputs: list[GraphBlob]) -> Names:
    x, y = inputs
    norms = []
    for blob in inputs:
        norm = graph.op("Sqrt", _row_sums(graph, graph.op("Mul", blob.name, blob.name), blob))
        norms.append(graph.op("Max", norm, graph.floats(SMALLEST_NORM)))
    product = _row_sums(graph, graph.op("Mul", x.name, y.name), x)
    return [graph.op("Div", product, graph.op("Mul", *norms))]


@OPERATORS.emits("LengthsSum", "LengthsMean")
def _by_lengths(graph: Graph, op: Op, inputs: list[GraphBlob], outputs: list[GraphBlob]) -> Names:
    x, lengths = inputs
    return [
        _segments(
            graph, x.name, len(x.shape), lengths.name, mean=op.definition.type == "LengthsMean"
        )
    ]


@OPERATORS.emits("SparseLengthsSum", "SparseLengthsMean", "SparseLengthsWeightedSum")
def _sparse_by_lengths(
    graph: Graph, op: Op, inputs: list[GraphBlob], outputs: list[GraphBlob]
) -> Names:
    x, *weights, index, lengths = inputs
    rank = len(x.shape)
    rows = graph.op("Gather", x.name, cast(graph, index.name, "int64"), axis=0)
    if weights:
        rows = graph.op("Mul", rows, graph.reshape(weights[0].name, [-1, *[1] * (rank - 1)]))
    return [
        _segments(graph, rows, rank, lengths.name, mean=op.definition.type == "SparseLengthsMean")
    ]


def _segments(graph: Graph, rows: str, rank: int, lengths: str, *, mean: bool) -> str:
    """Return the sum or mean of the rows of each segment: a matrix of zeros and ones times the
    rows.
    """
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
        flat = graph.op(
            "Reshape", rows, graph.op("Concat", graph.slice(shape, 0, 0, 1), width, axis=0)
        )
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
