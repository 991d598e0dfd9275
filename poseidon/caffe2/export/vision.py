"""Emitters of operators over images: convolution, pooling, normalization, resizing, regions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from poseidon.caffe.export.graph import OPERATORS, Graph, GraphBlob
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe2.export.elementwise import Blobs, Names
from poseidon.caffe2.export.trace import Op
from poseidon.caffe2.operators.layers.windows import Fit, Windows, spread

DIMENSIONS = ("", "1D", "2D", "3D")


def second(graph: Graph, x: GraphBlob) -> tuple[str, tuple[int, ...]]:
    """Return images with the channels last as images with the channels second, and their shape."""
    rank = len(x.shape)
    moved = graph.op("Transpose", x.name, perm=[0, rank - 1, *range(1, rank - 1)])
    return moved, (x.shape[0], x.shape[-1], *x.shape[1:-1])


def last(graph: Graph, value: str, rank: int) -> str:
    """Return images with the channels second as images with the channels last."""
    return graph.op("Transpose", value, perm=[0, *range(2, rank), 1])


class _Images:
    """The first input with the channels second, and results in the operator's order."""

    def __init__(self, graph: Graph, x: GraphBlob, *, is_last: bool) -> None:
        self.graph, self.is_last, self.rank = graph, is_last and len(x.shape) > 1, len(x.shape)
        self.name, self.shape = second(graph, x) if self.is_last else (x.name, x.shape)

    def ordered(self, value: str) -> str:
        return last(self.graph, value, self.rank) if self.is_last else value


def _filter(graph: Graph, w: GraphBlob, *, is_last: bool) -> tuple[str, tuple[int, ...]]:
    if not is_last:
        return w.name, w.shape
    array = graph.known(w.name)
    if array is None:
        return second(graph, w)
    return graph.constant(np.moveaxis(array, -1, 1)), (w.shape[0], w.shape[-1], *w.shape[1:-1])


def _window(fit: Fit) -> dict[str, list[int]]:
    return {
        "kernel_shape": list(fit.kernel),
        "strides": list(fit.stride),
        "dilations": list(fit.dilation),
    }


@OPERATORS.emits(*(f"Conv{count}" for count in DIMENSIONS))
def _conv(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows = Windows(op.definition)
    x = _Images(graph, inputs[0], is_last=windows.last)
    w, shape = _filter(graph, inputs[1], is_last=windows.last)
    fit = windows.fit(x.shape[2:], shape[2:])
    if min(*fit.before, *fit.after) < 0:
        raise LayerError("has a negative padding")
    bias = [blob.name for blob in inputs[2:]]
    pads = [*fit.before, *fit.after]
    value = graph.op("Conv", x.name, w, *bias, group=op["group"], pads=pads, **_window(fit))
    return [x.ordered(value)]


@OPERATORS.emits("ConvTranspose")
def _conv_transpose(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows = Windows(op.definition)
    x = _Images(graph, inputs[0], is_last=windows.last)
    w, shape = _filter(graph, inputs[1], is_last=windows.last)
    count = len(x.shape) - 2
    heads, tails = windows.paddings(count)
    bias = [blob.name for blob in inputs[2:]]
    value = graph.op(
        "ConvTranspose",
        *(x.name, w, *bias),
        group=op["group"],
        kernel_shape=list(windows.kernel_of(count, shape[2:])),
        strides=list(spread(windows.stride, count)),
        dilations=list(spread(windows.dilation, count)),
        pads=[*heads, *tails],
        output_padding=list(spread(windows.adjustment, count)),
    )
    return [x.ordered(value)]


@OPERATORS.emits(*(f"MaxPool{count}" for count in DIMENSIONS))
def _max_pool(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows = Windows(op.definition)
    x = _Images(graph, inputs[0], is_last=windows.last)
    if windows.whole:
        return [x.ordered(graph.op("GlobalMaxPool", x.name))]
    fit = windows.fit(x.shape[2:])
    value = x.name
    pads = [*fit.before, *fit.after]
    if min(pads) < 0:
        raise LayerError("has a negative padding")
    if any(pad >= kernel for pad, kernel in zip(pads, fit.kernel * 2, strict=True)):
        value, pads = _bordered(graph, value, fit, float(np.finfo(np.float32).min)), [0] * len(pads)
    return [x.ordered(graph.op("MaxPool", value, pads=pads, **_window(fit)))]


def _bordered(graph: Graph, value: str, fit: Fit, border: float) -> str:
    sides = graph.integers(0, 0, *fit.before, 0, 0, *fit.after)
    return graph.op("Pad", value, sides, graph.floats(border), mode="constant")


def _sums(graph: Graph, value: str, fit: Fit) -> str:
    """Return the mean of each window, with zeros around the image."""
    window = {"kernel_shape": list(fit.kernel), "strides": list(fit.stride)}
    return graph.op("AveragePool", _bordered(graph, value, fit, 0.0), **window)


@OPERATORS.emits(*(f"AveragePool{count}" for count in DIMENSIONS))
def _average_pool(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows = Windows(op.definition)
    x = _Images(graph, inputs[0], is_last=windows.last)
    if windows.whole:
        return [x.ordered(graph.op("GlobalAveragePool", x.name))]
    fit = windows.fit(x.shape[2:])
    value = _sums(graph, x.name, fit)
    if not op["count_include_pad"] and any((*fit.before, *fit.after)):
        value = graph.op("Mul", value, graph.constant(_shares(x.shape[2:], fit)))
    return [x.ordered(value)]


def _shares(images: tuple[int, ...], fit: Fit) -> np.ndarray[Any, Any]:
    """Return by what the mean of each window grows if only its elements in the image count."""
    total = np.ones((1, 1, *[1] * len(images)), np.float32)
    for axis, size in enumerate(images):
        starts = np.arange(fit.output[axis]) * fit.stride[axis] - fit.before[axis]
        inside = np.minimum(starts + fit.kernel[axis], size) - np.maximum(starts, 0)
        shape = [1] * total.ndim
        shape[axis + 2] = -1
        total = total * (fit.kernel[axis] / np.maximum(inside, 1)).astype(np.float32).reshape(shape)
    return total


@OPERATORS.emits("LpPool")
def _lp_pool(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows, power = Windows(op.definition), float(op["p"])
    x = _Images(graph, inputs[0], is_last=windows.last)
    fit = windows.fit(x.shape[2:])
    mean = _sums(graph, graph.op("Pow", graph.op("Abs", x.name), graph.floats(power)), fit)
    total = graph.op("Mul", mean, graph.floats(float(math.prod(fit.kernel))))
    return [x.ordered(graph.op("Pow", total, graph.floats(1 / power)))]


@OPERATORS.emits("SpatialBN")
def _spatial_bn(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    if not op["is_test"]:
        raise LayerError("has the statistics of its batch: set is_test")
    x = _Images(graph, inputs[0], is_last=op["order"] == "NHWC")
    rest = [blob.name for blob in inputs[1:5]]
    return [x.ordered(graph.op("BatchNormalization", x.name, *rest, epsilon=float(op["epsilon"])))]


@OPERATORS.emits("LRN")
def _lrn(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = _Images(graph, inputs[0], is_last=op["order"] == "NHWC")
    if op["size"] % 2 == 0:
        raise LayerError(f"has the even size {op['size']}")
    values = {name: float(op[name]) for name in ("alpha", "beta", "bias")}
    return [x.ordered(graph.op("LRN", x.name, size=op["size"], **values))]


@OPERATORS.emits("InstanceNorm", "GroupNorm")
def _group_norm(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = _Images(graph, inputs[0], is_last=op["order"] == "NHWC")
    channels, ones = x.shape[1], [1] * (len(x.shape) - 2)
    groups = channels if op.definition.type == "InstanceNorm" else op["group"]
    rows = graph.reshape(x.name, [0, groups, -1])
    unit = [graph.constant(np.full(groups, value, np.float32)) for value in (1, 0)]
    rows = graph.op("InstanceNormalization", rows, *unit, epsilon=float(op["epsilon"]))
    value = graph.reshape(rows, [0, *x.shape[1:]])
    scale, bias = (graph.reshape(blob.name, [1, channels, *ones]) for blob in inputs[1:3])
    return [x.ordered(graph.op("Add", graph.op("Mul", value, scale), bias))]


@OPERATORS.emits("AffineChannel")
def _affine_channel(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, *rest = inputs
    ones = [] if op["order"] == "NHWC" else [1] * (len(x.shape) - 2)
    scale, bias = (graph.reshape(blob.name, [-1, *ones]) for blob in rest)
    return [graph.op("Add", graph.op("Mul", x.name, scale), bias)]


@OPERATORS.emits("NCHW2NHWC", "NHWC2NCHW")
def _order(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = inputs[0]
    if op.definition.type == "NHWC2NCHW":
        return [second(graph, x)[0]]
    return [last(graph, x.name, len(x.shape))]


@OPERATORS.emits("ResizeNearest", "UpsampleBilinear")
def _resize(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    nearest = op.definition.type == "ResizeNearest"
    x = _Images(graph, inputs[0], is_last=nearest and op["order"] == "NHWC")
    scales = [op["height_scale"], op["width_scale"]]
    if len(inputs) > 1:
        given = graph.known(inputs[1].name)
        if given is None:
            raise LayerError("computes its scales")
        scales = given.tolist()
    if nearest:
        value = x.name
        for axis, (size, scale) in enumerate(zip(x.shape[2:], scales, strict=True), 2):
            places = np.arange(int(size * scale), dtype=np.float32) / np.float32(scale)
            chosen = graph.constant(np.minimum(places.astype(np.int64), size - 1))
            value = graph.op("Gather", value, chosen, axis=axis)
        return [x.ordered(value)]
    sizes = graph.integers(*(int(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)))
    how = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    return [graph.op("Resize", x.name, "", "", sizes, axes=[2, 3], **how)]


@OPERATORS.emits("PadImage")
def _pad_image(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    windows = Windows(op.definition)
    x = _Images(graph, inputs[0], is_last=windows.last)
    heads, tails = windows.paddings(2)
    sides = graph.integers(0, 0, *heads, 0, 0, *tails)
    value = graph.op("Pad", x.name, sides, graph.floats(op["value"]), mode=op["mode"].decode())
    return [x.ordered(value)]


@OPERATORS.emits("ChannelShuffle")
def _channel_shuffle(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x = _Images(graph, inputs[0], is_last=op["order"] == "NHWC")
    groups, rank = op["group"], len(x.shape)
    parts = graph.reshape(x.name, [0, groups, x.shape[1] // groups, *x.shape[2:]])
    mixed = graph.op("Transpose", parts, perm=[0, 2, 1, *range(3, rank + 1)])
    return [x.ordered(graph.reshape(mixed, [0, *x.shape[1:]]))]


def _sides(op: Op) -> list[int]:
    return [op["pad"] if op[f"pad_{side}"] is None else op[f"pad_{side}"] for side in "tlbr"]


@OPERATORS.emits("SpaceToBatch")
def _space_to_batch(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    (x,), size, (top, left, bottom, right) = inputs, op["block_size"], _sides(op)
    _, channels, high, wide = outputs[0].shape
    value = graph.op("Pad", x.name, graph.integers(0, 0, top, left, 0, 0, bottom, right))
    parts = graph.reshape(value, [x.shape[0], channels, high, size, wide, size])
    moved = graph.op("Transpose", parts, perm=[3, 5, 0, 1, 2, 4])
    return [graph.reshape(moved, [-1, channels, high, wide])]


@OPERATORS.emits("BatchToSpace")
def _batch_to_space(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    (x,), size, (top, left, bottom, right) = inputs, op["block_size"], _sides(op)
    _, channels, high, wide = x.shape
    parts = graph.reshape(x.name, [size, size, -1, channels, high, wide])
    moved = graph.op("Transpose", parts, perm=[2, 3, 4, 0, 5, 1])
    whole = graph.reshape(moved, [-1, channels, high * size, wide * size])
    cut = graph.slice(whole, 2, top, high * size - bottom)
    return [graph.slice(cut, 3, left, wide * size - right)]


@OPERATORS.emits("Im2Col")
def _im2col(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    """Return a convolution whose kernels each take one value of the window."""
    windows = Windows(op.definition)
    if windows.last:
        raise LayerError("has the order NHWC")
    (x,), fit = inputs, windows.fit(inputs[0].shape[2:])
    count = math.prod(fit.kernel)
    kernels = np.tile(np.eye(count, dtype=np.float32), (x.shape[1], 1)).reshape(-1, 1, *fit.kernel)
    pads = [*fit.before, *fit.after]
    return [
        graph.op(
            "Conv", x.name, graph.constant(kernels), group=x.shape[1], pads=pads, **_window(fit)
        )
    ]


@OPERATORS.emits("RoIAlign")
def _roi_align(graph: Graph, op: Op, inputs: Blobs, outputs: Blobs) -> Names:
    x, regions = _Images(graph, inputs[0], is_last=op["order"] == "NHWC"), inputs[1]
    if op["sampling_ratio"] < 1:
        raise LayerError("has as many points as its regions are large (sampling_ratio)")
    boxes, image = regions.name, ""
    if regions.shape[1] == 5:
        boxes = graph.slice(regions.name, 1, 1, 5)
        first = graph.reshape(graph.slice(regions.name, 1, 0, 1), [-1])
        image = graph.op("Cast", first, to=7)
    else:
        count = graph.slice(graph.op("Shape", boxes), 0, 0, 1)
        image = graph.op("ConstantOfShape", count, value=graph.tensor(np.zeros(1, np.int64)))
    value = graph.op(
        "RoiAlign",
        *(x.name, boxes, image),
        output_height=op["pooled_h"],
        output_width=op["pooled_w"],
        sampling_ratio=op["sampling_ratio"],
        spatial_scale=float(op["spatial_scale"]),
        coordinate_transformation_mode="half_pixel" if op["aligned"] else "output_half_pixel",
        mode="avg",
    )
    return [x.ordered(value)]
