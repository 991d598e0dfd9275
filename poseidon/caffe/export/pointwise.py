"""Emitters of layers that treat each value, channel or image alike: activations, normalization,
broadcast operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poseidon.caffe.export.graph import LAYERS, Graph, GraphBlob
from poseidon.caffe.layers.activation import Dropout
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.layers.batch_norm import BN, BatchNorm
from poseidon.caffe.layers.normalization import LRN, MVN, Normalize
from poseidon.caffe.layers.pointwise import Bias, Exp, Log, Power, Scale

Names = list[str]
Blobs = list[GraphBlob]


def array(tensor: Tensor) -> NDArray[np.float32]:
    """Return a parameter's values."""
    values: NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).numpy()
    return values


def parameter(
    graph: Graph, layer: torch.nn.Module, blob: str, shape: tuple[int, ...] | None = None
) -> str:
    """Return a learned blob of a layer as a constant, in the shape `shape` unless it is None."""
    values = array(getattr(layer, blob))
    return graph.constant(
        values if shape is None else values.reshape(shape), f"{graph.scope}.{blob}"
    )


def scaled(graph: Graph, value: str, factor: float, shift: float = 0.0) -> str:
    """Return factor * value + shift."""
    if factor != 1:
        value = graph.op("Mul", value, graph.floats(factor))
    return graph.op("Add", value, graph.floats(shift)) if shift else value


@LAYERS.emits("ReLU")
def _relu(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    slope = float(layer.slope)
    return [
        graph.op("LeakyRelu", bottoms[0].name, alpha=slope)
        if slope
        else graph.op("Relu", bottoms[0].name)
    ]


@LAYERS.emits("Sigmoid", "TanH", "AbsVal", "BNLL")
def _unary(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    kinds = {"TanH": "Tanh", "AbsVal": "Abs", "BNLL": "Softplus"}
    kind = layer.param.type
    return [graph.op(kinds.get(str(kind), str(kind)), bottoms[0].name)]


@LAYERS.emits("Dropout")
def _dropout(graph: Graph, layer: Dropout, bottoms: Blobs, tops: Blobs) -> Names:
    if layer.active:
        raise LayerError("draws in the phase TEST (sample_weights_test), which ONNX cannot")
    x = bottoms[0].name
    return [scaled(graph, x, layer.factor) if layer.factor != 1 else graph.op("Identity", x)]


@LAYERS.emits("ELU")
def _elu(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Elu", bottoms[0].name, alpha=float(layer.alpha))]


@LAYERS.emits("SeLu")
def _selu(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [
        scaled(
            graph, graph.op("Elu", bottoms[0].name, alpha=float(layer.alpha)), float(layer.factor)
        )
    ]


@LAYERS.emits("SeLuDropout")
def _selu_dropout(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    return [graph.op("Identity", bottoms[0].name)]


@LAYERS.emits("PReLU")
def _prelu(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    count = array(layer.slope).size
    slope = parameter(graph, layer, "slope", (count,) + (1,) * (len(bottoms[0].shape) - 2))
    return [graph.op("PRelu", bottoms[0].name, slope)]


@LAYERS.emits("Swish")
def _swish(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    x = bottoms[0].name
    return [graph.op("Mul", x, graph.op("Sigmoid", scaled(graph, x, float(layer.beta))))]


@LAYERS.emits("Clip", "ReLU6")
def _clip(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    low, high = float(getattr(layer, "low", 0.0)), float(getattr(layer, "high", 6.0))
    below = graph.op("Min", bottoms[0].name, graph.floats(high))
    return [graph.op("Max", below, graph.floats(low))]


@LAYERS.emits("Threshold")
def _threshold(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    above = graph.op("Greater", bottoms[0].name, graph.floats(float(layer.threshold)))
    return [graph.op("Cast", above, to=1)]


@LAYERS.emits("Power")
def _power(graph: Graph, layer: Power, bottoms: Blobs, tops: Blobs) -> Names:
    x = bottoms[0].name
    if layer.power == 0 or layer.scale == 0:
        return [scaled(graph, graph.op("Pow", x, graph.floats(0.0)), layer.constant)]
    inner = scaled(graph, x, layer.scale, layer.shift)
    if layer.power != 1:
        inner = graph.op("Pow", inner, graph.floats(layer.power))
    return [graph.op("Identity", inner) if inner == x else inner]


@LAYERS.emits("Exp")
def _exp(graph: Graph, layer: Exp, bottoms: Blobs, tops: Blobs) -> Names:
    return [
        scaled(graph, graph.op("Exp", scaled(graph, bottoms[0].name, layer.inner)), layer.outer)
    ]


@LAYERS.emits("Log")
def _log(graph: Graph, layer: Log, bottoms: Blobs, tops: Blobs) -> Names:
    inner = scaled(graph, bottoms[0].name, layer.scale, layer.shift)
    return [scaled(graph, graph.op("Log", inner), layer.outer)]


@LAYERS.emits("Scale", "Bias")
def _affine(graph: Graph, layer: Scale | Bias, bottoms: Blobs, tops: Blobs) -> Names:
    x = bottoms[0].name
    shape = tuple(layer.broadcast)

    def operand(blob: str) -> str:
        if len(bottoms) == 1 or (blob == "bias" and isinstance(layer, Scale)):
            return parameter(graph, layer, blob, shape)
        given = bottoms[1]
        if len(given.shape) == len(shape):
            return given.name
        return graph.reshape(given.name, [*given.extents, *(1,) * (len(shape) - len(given.shape))])

    if isinstance(layer, Bias):
        return [graph.op("Add", x, operand("bias"))]
    product = graph.op("Mul", x, operand("scale"))
    return [graph.op("Add", product, operand("bias")) if layer.biased else product]


@LAYERS.emits("Axpy")
def _axpy(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    a, x, z = bottoms
    trailing = (1,) * (len(x.shape) - 2)
    factor = graph.reshape(a.name, [*a.extents[:2], *trailing])
    return [graph.op("Add", graph.op("Mul", factor, x.name), z.name)]


@LAYERS.emits("BatchNorm")
def _batch_norm(graph: Graph, layer: BatchNorm, bottoms: Blobs, tops: Blobs) -> Names:
    (x,) = bottoms
    if not layer.reads_estimates:
        axes = [axis for axis in range(len(x.shape)) if axis != 1 or len(x.shape) == 1]
        return [_standardized(graph, x.name, axes, layer.eps)]
    mean, variance = (array(estimate) for estimate in layer.estimates())
    if len(x.shape) == 1:
        factor = 1 / np.sqrt(variance + np.float32(layer.eps))
        centred = graph.op("Sub", x.name, graph.constant(mean))
        return [graph.op("Mul", centred, graph.constant(factor))]
    values = (np.ones_like(mean), np.zeros_like(mean), mean, variance)
    return [
        graph.op(
            "BatchNormalization", x.name, *map(graph.constant, values), epsilon=float(layer.eps)
        )
    ]


def _standardized(graph: Graph, x: str, axes: list[int], eps: float) -> str:
    """Return (x - mean) / sqrt(variance + eps) over some axes."""
    over = graph.integers(*axes)
    centred = graph.op("Sub", x, graph.op("ReduceMean", x, over, keepdims=1))
    variance = graph.op("ReduceMean", graph.op("Mul", centred, centred), over, keepdims=1)
    return graph.op("Div", centred, graph.op("Sqrt", graph.op("Add", variance, graph.floats(eps))))


@LAYERS.emits("BN")
def _bn(graph: Graph, layer: BN, bottoms: Blobs, tops: Blobs) -> Names:
    (x,) = bottoms
    wide = [1] * len(x.shape)
    wide[layer.axis] = x.shape[layer.axis]
    slope, bias = array(layer.slope).reshape(wide), array(layer.bias).reshape(wide)
    value = x.name
    if layer.reads_running:
        variance = array(layer.variance).reshape(wide)
        value = graph.op("Sub", value, graph.constant(array(layer.mean).reshape(wide)))
        slope = slope / np.sqrt(variance + np.float32(layer.eps))
    elif not layer.infers:
        axes = [axis for axis in range(len(x.shape)) if axis != layer.axis]
        value = _standardized(graph, value, axes, layer.eps)
    names = [graph.op("Add", graph.op("Mul", value, graph.constant(slope)), graph.constant(bias))]
    if len(tops) > 1:  # SegNet's statistics of the batch
        over = graph.integers(*(axis for axis in range(len(x.shape)) if axis != layer.axis))
        mean = graph.op("ReduceMean", x.name, over, keepdims=1)
        centred = graph.op("Sub", x.name, mean)
        squares = graph.op("ReduceMean", graph.op("Mul", centred, centred), over, keepdims=1)
        names += [graph.reshape(each, tops[1].shape) for each in (mean, squares)]
    return names[: len(tops)]


@LAYERS.emits("LRN")
def _lrn(graph: Graph, layer: LRN, bottoms: Blobs, tops: Blobs) -> Names:
    x = bottoms[0].name
    if layer.across:
        return [
            graph.op("LRN", x, size=layer.size, alpha=layer.alpha, beta=layer.beta, bias=layer.k)
        ]
    reach = layer.size // 2
    mean = graph.op(
        "AveragePool",
        graph.op("Mul", x, x),
        kernel_shape=[layer.size] * 2,
        strides=[1, 1],
        pads=[reach] * 4,
        count_include_pad=1,
    )
    return [
        graph.op(
            "Mul",
            x,
            graph.op("Pow", scaled(graph, mean, layer.alpha, 1.0), graph.floats(-layer.beta)),
        )
    ]


@LAYERS.emits("MVN")
def _mvn(graph: Graph, layer: MVN, bottoms: Blobs, tops: Blobs) -> Names:
    lead = tops[0].extents[:1] if layer.across else tops[0].extents[:2]
    if layer.across:
        rows = graph.reshape(bottoms[0].name, [*lead, int(np.prod(tops[0].shape[1:]))])
    else:
        rows = graph.reshape(bottoms[0].name, [*lead, int(np.prod(tops[0].shape[2:]))])
    over = graph.integers(len(lead))
    centred = graph.op("Sub", rows, graph.op("ReduceMean", rows, over, keepdims=1))
    if layer.divides:
        variance = graph.op("ReduceMean", graph.op("Mul", centred, centred), over, keepdims=1)
        deviation = graph.op("Add", graph.op("Sqrt", variance), graph.floats(layer.eps))
        centred = graph.op("Div", centred, deviation)
    return [graph.reshape(centred, tops[0].extents)]


@LAYERS.emits("Normalize")
def _normalize(graph: Graph, layer: Normalize, bottoms: Blobs, tops: Blobs) -> Names:
    x = bottoms[0].name
    squares = graph.op("ReduceSum", graph.op("Mul", x, x), graph.integers(*layer.axes), keepdims=1)
    norm = graph.op("Sqrt", graph.op("Add", squares, graph.floats(layer.eps)))
    scale = parameter(graph, layer, "scale", tuple(layer.scale.shape) + tuple(layer.trailing))
    return [graph.op("Mul", graph.op("Div", x, norm), scale)]
