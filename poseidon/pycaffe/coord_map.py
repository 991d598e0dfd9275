"""Coordinate maps between blobs, for the Crop layers of fully convolutional nets.

Law: a layer with a sliding window maps the coordinate x of a pixel of its top to (x - b) / a in its
bottom. a is 1 / stride for a convolution and the stride for a deconvolution; b follows from pad and
kernel. Maps compose along a path of layers. Two blobs are related through a common ancestor. A map
is (axis, a, b): the last axis without coordinates (None for any), and scale and offset, one value
for all coordinates or one for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.pycaffe.net_spec import Function, Top, layers

Numbers = NDArray[np.float64]
CoordMap = tuple[int | None, Any, Any]
IDENTITY: CoordMap = (None, 1, 0)

SLIDING = frozenset({"Convolution", "Pooling", "Im2col"})
POINTWISE = frozenset(
    {
        *(
            "AbsVal",
            "BatchNorm",
            "Bias",
            "BNLL",
            "Clip",
            "Dropout",
            "Eltwise",
            "ELU",
            "Exp",
            "Log",
            "LRN",
            "MVN",
        ),
        *(
            "Power",
            "PReLU",
            "ReLU",
            "Scale",
            "SeLu",
            "SeLuDropout",
            "Sigmoid",
            "Split",
            "Swish",
            "TanH",
            "Threshold",
        ),
    }
)
LEGACY = ("pad_h", "pad_w", "kernel_h", "kernel_w", "stride_h", "stride_w")


class UndefinedMapException(Exception):
    """The layer, such as InnerProduct, does not map coordinates."""


class AxisMismatchException(Exception):
    """Two maps have different axes."""


def coord_map(fn: Function) -> CoordMap:
    """Return the map from a layer's bottom to its top.

    Raises:
        UndefinedMapException: the layer does not map coordinates.
        ValueError: the layer has its window as _h and _w.
    """
    if fn.type_name in SLIDING:
        axis, stride, reach, pad = _window(fn)
        return axis, 1 / stride, (pad - (reach - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, reach, pad = _window(fn)
        return axis, stride, (reach - 1) / 2 - pad
    if fn.type_name == "Crop":
        param = fn.params.get("crop_param", fn.params)
        return int(param.get("axis", 2)) - 1, 1, -_numbers(param.get("offset", 0))
    if fn.type_name in POINTWISE:
        return IDENTITY
    raise UndefinedMapException(f"{fn.type_name} does not map coordinates")


def _window(fn: Function) -> tuple[int, Numbers, Numbers, Numbers]:
    """Return axis, stride, extent of the dilated kernel, and pad."""
    field = "pooling_param" if fn.type_name == "Pooling" else "convolution_param"
    param: Mapping[str, Any] = fn.params.get(field, fn.params)
    wrong = [name for name in LEGACY if name in param]
    if wrong:
        raise ValueError(
            f"{fn.type_name} has {wrong[0]}, expected kernel_size, stride and pad, which also "
            "take lists"
        )
    kernel, dilation = _numbers(param.get("kernel_size", 1)), _numbers(param.get("dilation", 1))
    return (
        int(param.get("axis", 1)),
        _numbers(param.get("stride", 1)),
        (kernel - 1) * dilation + 1,
        _numbers(param.get("pad", 0)),
    )


def _numbers(value: Any) -> Numbers:
    return np.array(value, dtype=np.float64, ndmin=1)


def compose(base_map: CoordMap, next_map: CoordMap) -> CoordMap:
    """Return the map that applies `next_map` and then `base_map`.

    Raises:
        AxisMismatchException: the maps have different axes.
    """
    (axis, a, b), (other, next_a, next_b) = base_map, next_map
    if axis is not None and other is not None and axis != other:
        raise AxisMismatchException(f"the maps have different axes: {axis} and {other}")
    return other if axis is None else axis, a * next_a, a * next_b + b


def inverse(coord_map: CoordMap) -> CoordMap:
    axis, a, b = coord_map
    return axis, 1 / a, -b / a


def coord_map_from_to(top_from: Top, top_to: Top) -> CoordMap:
    """Return the map from the coordinates of one blob to the coordinates of another.

    Raises:
        RuntimeError: no blob is an ancestor of both through layers that map coordinates.
        AxisMismatchException: layers on the path have different axes.
    """
    known = _ancestors(top_from)
    for top, to_map in _ancestors(top_to).items():
        if top in known:
            return compose(to_map, inverse(known[top]))
    raise RuntimeError("the two blobs have no common ancestor through layers that map coordinates")


def _ancestors(top: Top) -> dict[Top, CoordMap]:
    """Return the ancestors of `top` through layers that map coordinates, nearest first, each
    with the map from it.
    """
    maps: dict[Top, CoordMap] = {top: IDENTITY}
    waiting = [top]
    while waiting:
        current = waiting.pop(0)
        try:
            step = coord_map(current.fn)
        except UndefinedMapException:
            continue
        # Only the extents of Crop's second bottom are used.
        inputs = current.fn.inputs[:1] if current.fn.type_name == "Crop" else current.fn.inputs
        for bottom in inputs:
            if bottom not in maps:
                maps[bottom] = compose(maps[current], step)
                waiting.append(bottom)
    return maps


def crop(top_from: Top, top_to: Top) -> Top:
    """Return a Crop layer that crops `top_from` to the extents of `top_to` with aligned pixels.

    Raises:
        AssertionError: the blobs differ in scale, or the offset is negative or not an integer.
        RuntimeError: the blobs are not connected.
    """
    axis, a, b = coord_map_from_to(top_from, top_to)
    scale, offset = _numbers(a), -_numbers(b)
    # As in pycaffe, whose users catch AssertionError.
    if not (scale == 1).all():
        raise AssertionError(f"cannot crop between scales (a = {scale})")
    if not (offset >= 0).all():
        raise AssertionError(f"cannot crop at a negative offset (b = {-offset})")
    if not (np.round(offset) == offset).all():
        raise AssertionError(f"cannot crop between two pixels (b = {-offset})")
    begin = 2 if axis is None else axis + 1
    top: Top = layers.Crop(
        top_from, top_to, crop_param={"axis": begin, "offset": [int(o) for o in offset]}
    )
    return top
