"""Emitters of layers over images: convolution, pooling, resizing, regions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from poseidon.caffe.export.graph import LAYERS, Graph, GraphBlob
from poseidon.caffe.export.pointwise import Blobs, Names, parameter
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.layers.convolution import BaseConvolution, Window
from poseidon.caffe.layers.pooling import Pooling


@LAYERS.emits(
    "Convolution",
    "DepthwiseConvolution",
    "HoleConvolution",
    "ConvolutionDepthwise",
    "Deconvolution",
)
def _convolution(graph: Graph, layer: BaseConvolution, bottoms: Blobs, tops: Blobs) -> Names:
    kind = "ConvTranspose" if layer.param.type == "Deconvolution" else "Conv"
    shape = tuple(layer.weight.shape) + ((1,) if layer.pointwise else ())
    operands = [parameter(graph, layer, "weight", shape)]
    if layer.bias is not None:
        operands.append(parameter(graph, layer, "bias"))
    window = layer.window
    settings = (
        {"group": layer.group}
        if layer.pointwise
        else {"group": layer.group, **_window_settings(window)}
    )
    names = []
    for bottom, top in zip(bottoms, tops, strict=True):
        value = bottom.name
        if not layer.plain:
            rest = list(bottom.shape[layer.axis :]) + ([1] if layer.pointwise else [])
            value = graph.reshape(value, [-1, *rest])
        value = graph.op(kind, value, *operands, **settings)
        names.append(value if layer.plain else graph.reshape(value, top.extents))
    return names


def _window_settings(window: Window) -> dict[str, list[int]]:
    return {
        "kernel_shape": list(window.kernel),
        "strides": list(window.stride),
        "pads": [*window.pad, *window.pad],
        "dilations": list(window.dilation),
    }


@LAYERS.emits("Im2col")
def _im2col(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    """Return a convolution whose kernels each take one value of the window."""
    (x,), window = bottoms, layer.window
    channels, count = x.shape[layer.axis], math.prod(window.kernel)
    kernels = np.tile(np.eye(count, dtype=np.float32), (channels, 1)).reshape(-1, 1, *window.kernel)
    folded = graph.reshape(x.name, [-1, *x.shape[layer.axis :]])
    value = graph.op(
        "Conv", folded, graph.constant(kernels), group=channels, **_window_settings(window)
    )
    return [graph.reshape(value, tops[0].extents)]


@LAYERS.emits("Pooling")
def _pooling(graph: Graph, layer: Pooling, bottoms: Blobs, tops: Blobs) -> Names:
    return pooled(graph, layer, bottoms[0])


def pooled(graph: Graph, layer: Pooling, bottom: GraphBlob) -> Names:
    """Return the tops of a Pooling layer: windows that exceed the end are padded,
    so that ONNX needs no rule of its own.
    """
    x, image = bottom.name, bottom.shape[2:]
    window: dict[str, Any] = {"kernel_shape": list(layer.kernel), "strides": list(layer.stride)}
    axes = list(zip(layer.extents, layer.stride, layer.kernel, layer.pad, image, strict=True))
    if layer.is_max:
        after = [max((count - 1) * s + k - p - size, 0) for count, s, k, p, size in axes]
        if any(end >= k for end, k in zip(after, layer.kernel, strict=True)):
            raise LayerError("has a window entirely outside the image, which ONNX does not pool")
        window["pads"] = [*layer.pad, *after]
        if not layer.with_mask:
            return [graph.op("MaxPool", x, **window)]
        top, index = graph.ops("MaxPool", x, outputs=2, **window)
        within = graph.op("Mod", index, graph.constant(np.array(math.prod(image), np.int64)))
        return [top, graph.op("Cast", within, to=1)]
    after = [max((count - 1) * s + k - 2 * p - size, 0) for count, s, k, p, size in axes]
    window["pads"] = [0, 0, *after]
    if any(layer.pad):  # zeros of the padding count for the mean
        high, wide = layer.pad
        x = graph.op("Pad", x, graph.integers(0, 0, high, wide, 0, 0, high, wide))
    mean = graph.op("AveragePool", x, **window)
    if not layer.is_stochastic:
        return [mean]
    squares = graph.op("AveragePool", graph.op("Mul", x, x), **window)
    least = graph.floats(float(np.finfo(np.float32).tiny))
    return [graph.op("Div", squares, graph.op("Add", mean, least))]


@LAYERS.emits("SPP")
def _spp(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    levels = [pooled(graph, level, bottoms[0])[0] for level in layer.levels]
    if len(levels) == 1:
        return levels
    return [graph.op("Concat", *(graph.op("Flatten", level, axis=1) for level in levels), axis=1)]


@LAYERS.emits("Interp")
def _interp(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    value = bottoms[0].name
    for axis, extent in enumerate(bottoms[0].shape[2:], 2):
        if layer.front or layer.back:
            value = graph.slice(value, axis, layer.front, extent - layer.back)
    return [_resized(graph, value, layer.extents, mode="linear", transformation="align_corners")]


def _resized(
    graph: Graph, value: str, extents: tuple[int, ...], *, mode: str, transformation: str
) -> str:
    return graph.op(
        "Resize",
        value,
        "",
        "",
        graph.integers(*extents),
        axes=[2, 3],
        mode=mode,
        coordinate_transformation_mode=transformation,
        nearest_mode="floor",
    )


@LAYERS.emits("Upsample")
def _upsample(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    x, top = bottoms[0], tops[0]
    if len(bottoms) == 1:
        return [_resized(graph, x.name, top.shape[2:], mode="nearest", transformation="asymmetric")]
    count, values = math.prod(top.shape[2:]), math.prod(x.shape[2:])
    flat = graph.reshape(x.name, [*x.extents[:2], values])
    index = graph.op("Cast", graph.reshape(bottoms[1].name, [*x.extents[:2], values]), to=7)
    absent = graph.op("Less", index, graph.constant(np.array(0, np.int64)))
    # One more cell takes the values without a place.
    index = graph.op("Where", absent, graph.constant(np.array(count, np.int64)), index)
    lead = graph.slice(graph.op("Shape", flat), 0, 0, 2)
    cells = graph.op("ConstantOfShape", graph.op("Concat", lead, graph.integers(count + 1), axis=0))
    filled = graph.op("ScatterElements", cells, index, flat, axis=2)
    return [graph.reshape(graph.slice(filled, 2, 0, count), top.extents)]


@LAYERS.emits("Reorg")
def _reorg(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    batch, (_, channels, high, wide) = tops[0].extents[0], bottoms[0].shape
    s = layer.stride
    inner = channels // s**2
    if layer.reverse:
        squares = graph.reshape(bottoms[0].name, [batch, s, s, inner, high, wide])
        moved = graph.op("Transpose", squares, perm=[0, 3, 4, 1, 5, 2])
    else:
        squares = graph.reshape(bottoms[0].name, [batch, inner, high, s, wide, s])
        moved = graph.op("Transpose", squares, perm=[0, 3, 5, 1, 2, 4])
    return [graph.reshape(moved, tops[0].extents)]


@LAYERS.emits("ROIPooling")
def _roi_pooling(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    regions = graph.reshape(bottoms[1].name, [-1, 5])
    pooling = {"pooled_shape": list(layer.parts), "spatial_scale": float(layer.scale)}
    return [graph.op("MaxRoiPool", bottoms[0].name, regions, **pooling)]
