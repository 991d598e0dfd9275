"""Emitters of layers that combine, reshape, select and multiply: Concat,
InnerProduct, Slice, ArgMax, LSTM and the like.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from poseidon.caffe.export.graph import LAYERS, Graph
from poseidon.caffe.export.pointwise import Blobs, Names, array, parameter, scaled
from poseidon.caffe.layers.combine import ArgMax, Eltwise, Reduction
from poseidon.caffe.layers.inner_product import Embed, InnerProduct
from poseidon.caffe.layers.recurrent import LSTM, RNN, Recurrent
from poseidon.caffe.layers.sources import DummyData
from poseidon.caffe.proto.caffe_pb2 import EltwiseParameter, ReductionParameter


@LAYERS.emits("Split", "Silence")
def _split(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Identity", bottoms[0].name) for _ in tops]


@LAYERS.emits("Concat")
def _concat(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Concat", *(bottom.name for bottom in bottoms), axis=layer.axis)]


@LAYERS.emits("Slice")
def _slice(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    if len(tops) == 1:
        return [graph.op("Identity", bottoms[0].name)]
    parts = graph.integers(*layer.extents)
    return graph.ops("Split", bottoms[0].name, parts, outputs=len(tops), axis=layer.axis)


@LAYERS.emits("Eltwise")
def _eltwise(graph: Graph, layer: Eltwise, bottoms: Blobs, tops: Blobs) -> Names:
    names = [bottom.name for bottom in bottoms]
    if layer.operation == EltwiseParameter.SUM:
        return [graph.op("Sum", *map(lambda x, c: scaled(graph, x, c), names, layer.coefficients))]
    if layer.operation == EltwiseParameter.MAX:
        return [graph.op("Max", *names)]
    top = names[0]
    for name in names[1:]:
        top = graph.op("Mul", top, name)
    return [top]


@LAYERS.emits("Flatten", "Reshape")
def _reshape(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.reshape(bottoms[0].name, tops[0].extents)]


@LAYERS.emits("Permute")
def _permute(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Transpose", bottoms[0].name, perm=list(layer.order))]


@LAYERS.emits("Crop")
def _crop(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    value = bottoms[0].name
    for axis, (offset, extent) in enumerate(
        zip(layer.offsets, layer.extents, strict=True), layer.axis
    ):
        if axis or not tops[0].dynamic:
            value = graph.slice(value, axis, offset, offset + extent)
    return [graph.op("Identity", value) if value == bottoms[0].name else value]


@LAYERS.emits("Tile")
def _tile(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Tile", bottoms[0].name, graph.integers(*layer.repeats))]


@LAYERS.emits("BatchReindex")
def _batch_reindex(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Gather", bottoms[0].name, graph.op("Cast", bottoms[1].name, to=7), axis=0)]


@LAYERS.emits("Filter")
def _filter(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    chosen = graph.op("Cast", graph.reshape(bottoms[-1].name, [-1]), to=9)
    return [graph.op("Compress", bottom.name, chosen, axis=0) for bottom in bottoms[:-1]]


@LAYERS.emits("ShuffleChannel")
def _shuffle(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    batch, channels = tops[0].extents[0], tops[0].shape[1]
    rest = math.prod(tops[0].shape[2:])
    grouped = graph.reshape(bottoms[0].name, [batch, layer.group, channels // layer.group, rest])
    mixed = graph.op("Transpose", grouped, perm=[0, 2, 1, 3])
    return [graph.reshape(mixed, tops[0].extents)]


@LAYERS.emits("InnerProduct")
def _inner_product(graph: Graph, layer: InnerProduct, bottoms: Blobs, tops: Blobs) -> Names:
    (x,), value = bottoms, bottoms[0].name
    if layer.axis == 1:
        if len(x.shape) > 2:
            value = graph.op("Flatten", value, axis=1)
        operands = [
            parameter(graph, layer, name) for name in ("weight", "bias") if _has(layer, name)
        ]
        return [graph.op("Gemm", value, *operands, transB=0 if layer.transpose else 1)]
    value = graph.reshape(value, [*x.extents[: layer.axis], math.prod(x.shape[layer.axis :])])
    weight = array(layer.weight if layer.transpose else layer.weight.t())
    top = graph.op("MatMul", value, graph.constant(weight, f"{graph.scope}.weight"))
    return [graph.op("Add", top, parameter(graph, layer, "bias")) if _has(layer, "bias") else top]


def _has(layer: Any, blob: str) -> bool:
    return getattr(layer, blob, None) is not None


@LAYERS.emits("Embed")
def _embed(graph: Graph, layer: Embed, bottoms: Blobs, tops: Blobs) -> Names:
    index = graph.op("Cast", bottoms[0].name, to=7)
    top = graph.op("Gather", parameter(graph, layer, "weight"), index, axis=0)
    return [graph.op("Add", top, parameter(graph, layer, "bias")) if _has(layer, "bias") else top]


@LAYERS.emits("Softmax")
def _softmax(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Softmax", bottoms[0].name, axis=layer.axis)]


@LAYERS.emits("Reduction")
def _reduction(graph: Graph, layer: Reduction, bottoms: Blobs, tops: Blobs) -> Names:
    (x,) = bottoms
    rest = math.prod(x.shape[layer.axis :]) if layer.axis else -1
    value = graph.reshape(x.name, [*x.extents[: layer.axis], rest])
    if layer.operation == ReductionParameter.ASUM:
        value = graph.op("Abs", value)
    elif layer.operation == ReductionParameter.SUMSQ:
        value = graph.op("Mul", value, value)
    kind = "ReduceMean" if layer.operation == ReductionParameter.MEAN else "ReduceSum"
    return [
        scaled(graph, graph.op(kind, value, graph.integers(layer.axis), keepdims=0), layer.coeff)
    ]


@LAYERS.emits("ArgMax")
def _arg_max(graph: Graph, layer: ArgMax, bottoms: Blobs, tops: Blobs) -> Names:
    (x,) = bottoms
    axis, value = (
        (layer.axis, x.name) if layer.by_axis else (1, graph.op("Flatten", x.name, axis=1))
    )
    count = x.shape[axis] if layer.by_axis else math.prod(x.shape[1:])
    # Of equal values TopK takes the first, Caffe the last: the axis is reversed.
    far = np.iinfo(np.int64).min
    back = graph.op(
        "Slice",
        value,
        graph.integers(-1),
        graph.integers(far),
        graph.integers(axis),
        graph.integers(-1),
    )
    values, index = graph.ops("TopK", back, graph.integers(layer.top_k), outputs=2, axis=axis)
    forward = graph.op("Sub", graph.integers(count - 1), index)
    found = graph.op("Cast", forward, to=1)
    if layer.by_axis:
        return [values if layer.with_values else found]
    parts = [found, values] if layer.with_values else [found]
    lifted = [graph.op("Unsqueeze", part, graph.integers(1)) for part in parts]
    stacked = graph.op("Concat", *lifted, axis=1)
    return [graph.reshape(stacked, tops[0].extents)]


@LAYERS.emits("Parameter")
def _parameter(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Identity", parameter(graph, layer, "value"))]


@LAYERS.emits("DummyData")
def _dummy_data(graph: Graph, layer: DummyData, bottoms: Blobs, tops: Blobs) -> Names:
    return [
        graph.op("Identity", graph.constant(array(layer.constants[i]))) for i in range(len(tops))
    ]


@LAYERS.emits("PriorBox")
def _prior_box(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Identity", graph.constant(array(layer.top), f"{graph.scope}.boxes"))]


@LAYERS.emits("LSTMUnit")
def _lstm_unit(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    cell, gates, cont = bottoms
    kept = graph.op("Unsqueeze", cont.name, graph.integers(2))
    after, output = _lstm_step(graph, cell.name, gates.name, kept)
    return [after, output]


def _lstm_step(graph: Graph, cell: str, gates: str, kept: str) -> tuple[str, str]:
    """Return the cell state and the output after one step; `kept` is cont with one more axis."""
    i, f, o, g = graph.ops("Split", gates, outputs=4, axis=-1, num_outputs=4)
    i, f, o = (graph.op("Sigmoid", gate) for gate in (i, f, o))
    held = graph.op("Mul", graph.op("Mul", f, kept), cell)
    after = graph.op("Add", held, graph.op("Mul", i, graph.op("Tanh", g)))
    return after, graph.op("Mul", o, graph.op("Tanh", after))


@LAYERS.emits("LSTM", "RNN")
def _recurrent(graph: Graph, layer: LSTM | RNN, bottoms: Blobs, tops: Blobs) -> Names:
    """Unroll the timesteps. The first state is zero: it is not kept between runs."""
    x, cont = bottoms[:2]
    steps, streams = x.shape[:2]
    exposed = len(tops) - 1
    from_x = _inputs_part(graph, layer, bottoms)
    if exposed:
        given = [bottom.name for bottom in bottoms[-exposed:]]
        state = [graph.reshape(name, [streams, layer.units]) for name in given]
    else:
        state = [graph.constant(np.zeros((streams, layer.units), np.float32))] * layer.STATES
    recurrent = graph.constant(array(layer.weight_h.t()), f"{graph.scope}.weight_h")
    outputs = []
    for step in range(steps):
        at = graph.constant(np.array(step, np.int64))
        now = graph.op("Gather", from_x, at, axis=0)
        kept = graph.op("Unsqueeze", graph.op("Gather", cont.name, at, axis=0), graph.integers(1))
        held = graph.op("MatMul", graph.op("Mul", state[0], kept), recurrent)
        gates = graph.op("Add", now, held)
        if isinstance(layer, LSTM):
            cell, output = _lstm_step(graph, state[1], gates, kept)
            state = [output, cell]
        else:
            state = [graph.op("Tanh", gates)]
        outputs.append(graph.op("Unsqueeze", state[0], graph.integers(0)))
    top = graph.op("Concat", *outputs, axis=0)
    if isinstance(layer, RNN):
        weight = graph.constant(array(layer.weight_o.t()), f"{graph.scope}.weight_o")
        top = graph.op("Add", graph.op("MatMul", top, weight), parameter(graph, layer, "bias_o"))
        top = graph.op("Tanh", top)
    return [top, *(graph.op("Unsqueeze", one, graph.integers(0)) for one in state[:exposed])]


def _inputs_part(graph: Graph, layer: Recurrent, bottoms: Blobs) -> str:
    """Return the inputs' part of the arguments of gates or hidden units, T x N x G."""
    x = bottoms[0]
    flat = graph.reshape(x.name, [*x.shape[:2], math.prod(x.shape[2:])])
    weight = graph.constant(array(layer.weight_x.t()), f"{graph.scope}.weight_x")
    part = graph.op("Add", graph.op("MatMul", flat, weight), parameter(graph, layer, "bias_x"))
    if not layer.has_static:
        return part
    static = graph.reshape(bottoms[2].name, [bottoms[2].shape[0], math.prod(bottoms[2].shape[1:])])
    more = graph.constant(array(layer.weight_static.t()), f"{graph.scope}.weight_static")
    return graph.op("Add", part, graph.op("MatMul", static, more))
