"""Emitters of layers that choose boxes: DetectionOutput, Proposal, PSROIPooling, ROIAlign."""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.caffe.export.graph import LAYERS, Graph
from poseidon.caffe.export.pointwise import Blobs, Names, array
from poseidon.caffe.layers import detection as boxes_of
from poseidon.caffe.layers.base import LayerError
from poseidon.caffe.proto.caffe_pb2 import PriorBoxParameter


@LAYERS.emits("PSROIPooling")
def _psroi_pooling(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    feature = bottoms[0]
    if feature.shape[0] != 1:
        raise LayerError(f"has {feature.shape[0]} images, expected 1 in ONNX")
    regions = graph.reshape(bottoms[1].name, [-1, 5])
    x1, y1, x2, y2 = (graph.slice(regions, 1, side, side + 1) for side in range(1, 5))
    rows = _part_weights(graph, layer, y1, y2, feature.shape[2])
    columns = _part_weights(graph, layer, x1, x2, feature.shape[3])
    parts = graph.reshape(feature.name, [layer.depth, layer.group, layer.group, *feature.shape[2:]])
    found = graph.op("Einsum", parts, rows, equation="cpqhw,rph->rcpqw")
    return [graph.op("Einsum", found, columns, equation="rcpqw,rqw->rcpq")]


def _part_weights(graph: Graph, layer: Any, first: str, last: str, extent: int) -> str:
    """Return the weight of each cell of a side in the mean of each part, R x K x extent, from
    corners R x 1.
    """
    first, last = (_rounded(graph, value) for value in (first, last))
    begin = graph.op("Mul", first, graph.floats(layer.scale))
    end = graph.op("Mul", graph.op("Add", last, graph.floats(1.0)), graph.floats(layer.scale))
    side = graph.op("Max", graph.op("Sub", end, begin), graph.floats(0.1))
    part = graph.op("Div", side, graph.floats(float(layer.group)))
    index = np.arange(layer.group, dtype=np.float32)
    low = graph.op(
        "Floor", graph.op("Add", graph.op("Mul", part, graph.constant(index[None])), begin)
    )
    high = graph.op(
        "Ceil", graph.op("Add", graph.op("Mul", part, graph.constant(index[None] + 1)), begin)
    )
    bounds = [
        graph.op(
            "Unsqueeze",
            graph.op("Min", graph.op("Max", edge, graph.floats(0.0)), graph.floats(float(extent))),
            graph.integers(2),
        )
        for edge in (low, high)
    ]
    cell = graph.constant(np.arange(extent, dtype=np.float32))
    inside = graph.op(
        "And", graph.op("GreaterOrEqual", cell, bounds[0]), graph.op("Less", cell, bounds[1])
    )
    count = graph.op("Max", graph.op("Sub", bounds[1], bounds[0]), graph.floats(1.0))
    return graph.op("Div", graph.op("Cast", inside, to=1), count)


def _rounded(graph: Graph, value: str) -> str:
    """Return a value rounded half away from 0; Round of ONNX rounds half to even."""
    half = graph.op("Mul", graph.op("Sign", value), graph.floats(0.5))
    moved = graph.op("Add", value, half)
    return graph.op("Cast", graph.op("Cast", moved, to=7), to=1)  # towards 0


@LAYERS.emits("ROIAlign")
def _roi_align(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    regions = graph.reshape(bottoms[1].name, [-1, 5])
    image = graph.op("Cast", graph.reshape(graph.slice(regions, 1, 0, 1), [-1]), to=7)
    settings = {
        "output_height": layer.parts[0],
        "output_width": layer.parts[1],
        "sampling_ratio": max(layer.ratio, 0),
        "spatial_scale": float(layer.scale),
        "coordinate_transformation_mode": "output_half_pixel",
        "mode": "avg",
    }
    return [graph.op("RoiAlign", bottoms[0].name, graph.slice(regions, 1, 1, 5), image, **settings)]


def _decoded(graph: Graph, codes: str, center: str, size: str, half_size: str) -> tuple[str, str]:
    """Return the centers and half the sides of boxes of CENTER_SIZE codes (..., 4)."""
    middle = graph.op("Add", graph.op("Mul", graph.slice(codes, -1, 0, 2), size), center)
    reach = graph.op("Mul", graph.op("Exp", graph.slice(codes, -1, 2, 4)), half_size)
    return middle, reach


@LAYERS.emits("DetectionOutput")
def _detection_output(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    """As the layer, but for an image without any detection, which has no row here."""
    settings, nms = layer.settings, layer.settings.nms_param
    if not settings.share_location:
        raise LayerError("has share_location: false, expected true in ONNX")
    if nms.eta < 1:
        raise LayerError(f"has eta {nms.eta:g}, expected 1 in ONNX")
    locations, scores, priors = bottoms
    count, classes = layer.priors, layer.classes
    pair = graph.reshape(priors.name, [2, count, 4])
    prior = graph.reshape(graph.slice(pair, 0, 0, 1), [count, 4])
    code = graph.reshape(locations.name, [*locations.extents[:1], count, 4])
    if not settings.variance_encoded_in_target:
        code = graph.op("Mul", code, graph.slice(pair, 0, 1, 2))
    boxes = _boxes_of_code(graph, settings.code_type, code, prior)
    by_class = graph.reshape(scores.name, [*scores.extents[:1], count, classes])
    conf = graph.op("Transpose", by_class, perm=[0, 2, 1])
    able = graph.op("Greater", conf, graph.floats(max(layer.least_score, -3e38)))
    if settings.background_label_id >= 0:
        wanted = np.ones((1, classes, 1), bool)
        wanted[0, settings.background_label_id] = False
        able = graph.op("And", able, graph.constant(wanted))
    if 0 <= layer.top_k < count:
        able = graph.op("And", able, _among_best(graph, conf, able, layer.top_k))
    lowest = graph.floats(-3.4e38)
    able_conf = graph.op("Where", able, conf, lowest)
    chosen = graph.op(
        "NonMaxSuppression",
        boxes,
        able_conf,
        graph.constant(np.array([count], np.int64)),
        graph.constant(np.array([nms.nms_threshold], np.float32)),
        graph.constant(np.array([-3.3e38], np.float32)),
    )
    found = graph.op("GatherND", conf, chosen)
    if settings.keep_top_k >= 0:
        chosen, found = _best_of_image(graph, chosen, found, settings.keep_top_k)
    image, label, prior_index = graph.ops("Split", chosen, outputs=3, axis=1, num_outputs=3)
    corners = graph.op("GatherND", boxes, graph.op("Concat", image, prior_index, axis=1))
    columns = [
        graph.op("Cast", image, to=1),
        graph.op("Cast", label, to=1),
        graph.reshape(found, [-1, 1]),
    ]
    rows = graph.op("Concat", *columns, corners, axis=1)
    return [graph.reshape(rows, [1, 1, -1, 7])]


def _boxes_of_code(graph: Graph, kind: int, code: str, prior: str) -> str:
    """Return the boxes (N, P, 4) of codes, which contain no variance any more."""
    if kind == PriorBoxParameter.CORNER:
        return graph.op("Add", prior, code)
    low, high = graph.slice(prior, 1, 0, 2), graph.slice(prior, 1, 2, 4)
    size = graph.op("Sub", high, low)
    if kind == PriorBoxParameter.CORNER_SIZE:
        twice = graph.op("Concat", size, size, axis=1)
        return graph.op("Add", prior, graph.op("Mul", code, twice))
    half = graph.floats(0.5)
    center = graph.op("Mul", graph.op("Add", low, high), half)
    middle, reach = _decoded(graph, code, center, size, graph.op("Mul", size, half))
    return graph.op(
        "Concat", graph.op("Sub", middle, reach), graph.op("Add", middle, reach), axis=-1
    )


def _among_best(graph: Graph, conf: str, able: str, most: int) -> str:
    """Return whether each score (N, C, P) is one of the `most` best of its class that may be
    chosen.
    """
    candidates = graph.op("Where", able, conf, graph.floats(-3.4e38))
    _, index = graph.ops("TopK", candidates, graph.integers(most), outputs=2, axis=2)
    nothing = graph.op("Mul", graph.op("Cast", able, to=1), graph.floats(0.0))
    ones = graph.op("Expand", graph.floats(1.0), graph.op("Shape", index))
    return graph.op("Cast", graph.op("ScatterElements", nothing, index, ones, axis=2), to=9)


def _best_of_image(graph: Graph, chosen: str, found: str, most: int) -> tuple[str, str]:
    """Return the `most` best of each image, in the order that they have: a row stays if fewer
    are better.
    """
    image = graph.slice(chosen, 1, 0, 1)
    same = graph.op("Equal", image, graph.op("Transpose", image, perm=[1, 0]))
    column, row = graph.reshape(found, [-1, 1]), graph.reshape(found, [1, -1])
    index = graph.op("NonZero", graph.op("Equal", found, found))  # 0, 1, ... for each row
    earlier = graph.op("Less", index, graph.op("Transpose", index, perm=[1, 0]))
    ties = graph.op("And", graph.op("Equal", row, column), earlier)
    better = graph.op("And", same, graph.op("Or", graph.op("Greater", row, column), ties))
    rank = graph.op("ReduceSum", graph.op("Cast", better, to=1), graph.integers(1), keepdims=0)
    stays = graph.op("Less", rank, graph.floats(float(most)))
    return graph.op("Compress", chosen, stays, axis=0), graph.op("Compress", found, stays, axis=0)


@LAYERS.emits("Proposal")
def _proposal(graph: Graph, layer: Any, bottoms: Blobs, tops: Blobs) -> Names:
    """As the layer, for one image."""
    scores, deltas, info = bottoms
    if scores.shape[0] != 1:
        raise LayerError(f"has {scores.shape[0]} images, expected 1 in ONNX")
    high, wide = scores.shape[2:]
    count = len(layer.base)
    anchors = array(boxes_of.anchors_of_map(layer.base, high, wide, layer.stride))
    sides = anchors[:, 2:] - anchors[:, :2] + 1
    center = graph.constant(anchors[:, :2] + np.float32(0.5) * sides)
    code = _rows_of_map(graph, deltas.name, 4)
    middle, reach = _decoded(
        graph, code, center, graph.constant(sides), graph.constant(np.float32(0.5) * sides)
    )
    foreground = _rows_of_map(graph, graph.slice(scores.name, 1, count, 2 * count), 1)
    size = graph.reshape(info.name, [-1])
    image = graph.op(  # width and height, as far as a corner may go
        "Max",
        graph.op("Sub", graph.op("Gather", size, graph.integers(1, 0), axis=0), graph.floats(1.0)),
        graph.floats(0.0),
    )
    corners = [
        graph.op("Min", graph.op("Max", corner, graph.floats(0.0)), image)
        for corner in (graph.op("Sub", middle, reach), graph.op("Add", middle, reach))
    ]
    # With one more pixel at the end overlaps are computed as of boxes whose corners are inside.
    after = graph.op("Add", corners[1], graph.floats(1.0))
    least = graph.op("Mul", graph.slice(size, 0, 2, 3), graph.floats(float(layer.smallest)))
    large = graph.op("GreaterOrEqual", graph.op("Sub", after, corners[0]), least)
    able = graph.op(
        "Equal",
        graph.op("ReduceMin", graph.op("Cast", large, to=1), graph.integers(1)),
        graph.floats(1.0),
    )
    score = graph.op("Where", able, foreground, graph.floats(-3.4e38))
    total = anchors.shape[0]
    boxes = graph.op("Concat", corners[0], after, axis=1)
    best, order = graph.ops(
        "TopK", score, graph.integers(min(layer.before, total)), outputs=2, axis=0
    )
    order = graph.reshape(order, [-1])
    chosen = graph.op(
        "NonMaxSuppression",
        graph.op("Unsqueeze", graph.op("Gather", boxes, order, axis=0), graph.integers(0)),
        graph.reshape(best, [1, 1, -1]),
        graph.constant(np.array([min(layer.after, total)], np.int64)),
        graph.constant(np.array([layer.threshold], np.float32)),
        graph.constant(np.array([-3.3e38], np.float32)),
    )
    kept = graph.op("Gather", order, graph.reshape(graph.slice(chosen, 1, 2, 3), [-1]), axis=0)
    inside = graph.op("Concat", *corners, axis=1)
    found = graph.op("Gather", inside, kept, axis=0)
    zeros = graph.op("Mul", graph.slice(found, 1, 0, 1), graph.floats(0.0))
    names = [graph.op("Concat", zeros, found, axis=1)]
    if len(tops) > 1:
        names.append(graph.reshape(graph.op("Gather", foreground, kept, axis=0), [-1]))
    return names


def _rows_of_map(graph: Graph, value: str, width: int) -> str:
    """Return a map 1 x (A width) x H x W as rows of `width` values in the order of rows,
    columns, anchors.
    """
    return graph.reshape(graph.op("Transpose", value, perm=[0, 2, 3, 1]), [-1, width])
