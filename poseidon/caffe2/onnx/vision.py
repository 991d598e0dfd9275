"""The operators of ONNX on images, and those that change shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2.onnx.nodes import CONVERTERS, Node, NoForm, converts
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto


@converts("Shape")
def _shape(node: Node) -> None:
    start, end = node.get("start", 0), node.get("end")
    if not start and end is None:
        node.emit("Shape")
        return
    low, high, _ = slice(start, end).indices(len(node.shape()))
    whole = node.step("Shape", node.inputs)
    node.emit("Slice", [whole], starts=[low], ends=[max(low, high)])


@converts("Reshape")
def _reshape(node: Node) -> None:
    node.allow(allowzero=0)
    if "shape" in node.attributes or node.inputs[1] in node.facts.constants:
        node.emit(
            "Reshape",
            node.inputs[:1],
            [node.outputs[0], node.rest()],
            shape=node.setting("shape", 1),
        )
    else:
        node.emit("Reshape", node.inputs, [node.outputs[0], node.rest()])


@converts("Squeeze", "Unsqueeze")
def _squeeze(node: Node) -> None:
    axes = node.setting("axes", 1)
    if node.kind == "Squeeze" and axes is None:
        axes = [axis for axis, extent in enumerate(node.shape()) if extent == 1]
    if min(axes, default=0) < 0:
        rank = len(node.shape()) + (len(axes) if node.kind == "Unsqueeze" else 0)
        axes = [axis % rank for axis in axes]
    if not axes:
        node.emit("Copy", node.inputs[:1])
        return
    kind = "Squeeze" if node.kind == "Squeeze" else "ExpandDims"
    node.emit(kind, node.inputs[:1], dims=sorted(axes))


@converts("Split")
def _split(node: Node) -> None:
    axis, sizes = node.axis(0), node.setting("split", 1)
    if sizes is None and "num_outputs" in node.attributes:
        extent = node.shape()[axis]
        if extent is None:
            raise NoForm("the extent that it divides is not known")
        part = -(-extent // len(node.outputs))
        sizes = [max(min(part, extent - part * number), 0) for number in range(len(node.outputs))]
    node.emit("Split", node.inputs[:1], node.outputs, axis=axis, split=sizes)


@converts("Slice")
def _slice(node: Node) -> None:
    starts, ends = node.setting("starts", 1), node.setting("ends", 2)
    axes = node.setting("axes", 3) or list(range(len(starts)))
    steps = node.setting("steps", 4) or [1] * len(starts)
    if any(step != 1 for step in steps):
        raise NoForm(f"Caffe2 has no steps {steps}")
    rank = len(node.shape()) if min(axes) < 0 else 0
    value = node.inputs[0]
    for number, (start, end, axis) in enumerate(zip(starts, ends, axes, strict=True)):
        # Caffe2 counts -1 as the end; each of its operators cuts one dimension.
        first, last = (limit - 1 if limit < 0 else min(limit, 2**31 - 1) for limit in (start, end))
        place = axis % rank if axis < 0 else axis
        limits: dict[str, Any] = {
            "starts": [*[0] * place, max(first, -(2**31))],
            "ends": [*[-1] * place, -1 if last >= 2**31 - 1 else last],
        }
        if number == len(axes) - 1:
            node.emit("Slice", [value], **limits)
        else:
            value = node.step("Slice", [value], **limits)


@converts("DepthToSpace", "SpaceToDepth")
def _depth(node: Node) -> None:
    size, shape = int(node.get("blocksize")), node.shape()
    if node.kind == "SpaceToDepth":
        node.allow(mode="DCR")
    if len(shape) != 4 or None in shape[1:]:
        raise NoForm("the size of its input is not known")
    channels, height, width = (int(extent or 0) for extent in shape[1:])
    if node.kind == "SpaceToDepth":
        inner = [0, channels, height // size, size, width // size, size]
        order, outer = [0, 3, 5, 1, 2, 4], [0, channels * size**2, height // size, width // size]
    elif node.get("mode", "DCR") == "CRD":
        inner, order = [0, channels // size**2, size, size, height, width], [0, 1, 4, 2, 5, 3]
    else:
        inner, order = [0, size, size, channels // size**2, height, width], [0, 3, 4, 1, 5, 2]
    if node.kind == "DepthToSpace":
        outer = [0, channels // size**2, height * size, width * size]
    parts = node.facts.fresh(f"{node.outputs[0]}/parts")
    node.emit("Reshape", outputs=[parts, node.rest()], shape=inner)
    moved = node.step("Transpose", [parts], axes=order)
    node.emit("Reshape", [moved], [node.outputs[0], node.rest()], shape=outer)


@converts("ConstantOfShape")
def _constant_of_shape(node: Node) -> None:
    value = node.get("value")
    array = np.zeros(1, np.float32) if value is None else onnx_module().numpy_helper.to_array(value)
    names = {kind: kind.upper() for kind in ("int64", "int32", "bool")}
    names |= {"float32": "FLOAT", "float64": "DOUBLE"}
    if str(array.dtype) not in names:
        raise NoForm(f"Caffe2 fills no tensors of type {array.dtype}")
    node.emit(
        "ConstantFill",
        input_as_shape=1,
        value=array.reshape(()).item(),
        dtype=TensorProto.DataType.Value(names[str(array.dtype)]),
    )


@converts("Pad")
def _pad(node: Node) -> None:
    pads = node.setting("pads", 1, node.get("paddings"))
    rank = len(pads) // 2
    mode = node.get("mode", "constant")
    outside = [pads[place] for place in range(2 * rank) if place % rank < rank - 2]
    if 3 in node or rank != 4 or any(outside) or mode not in ("constant", "reflect", "edge"):
        raise NoForm("Caffe2 pads height and width of images N x C x H x W only")
    value = node.setting("value", 2, 0.0)
    node.emit(
        "PadImage",
        node.inputs[:1],
        mode=mode,
        value=float(value or 0),
        pads=[*pads[2:4], *pads[6:8]],
    )


def _windows(node: Node) -> dict[str, Any]:
    """Return the arguments for kernel, stride, dilation and padding."""
    given: dict[str, Any] = {
        "kernels": node.get("kernel_shape"),
        "strides": node.get("strides"),
        "dilations": node.get("dilations"),
    }
    automatic = node.get("auto_pad", "NOTSET")
    if automatic == "SAME_UPPER":
        given["legacy_pad"] = 2
    elif automatic == "NOTSET":
        given["pads"] = node.get("pads")
    elif automatic != "VALID":
        raise NoForm(f"Caffe2 has no auto_pad={automatic}")
    if node.get("ceil_mode"):
        pads = given.pop("pads", None) or [0]
        if (
            len(set(pads)) > 1
            or len(set(node.get("dilations") or [1])) > 1
            or automatic != "NOTSET"
        ):
            raise NoForm("Caffe2 rounds up with one padding for all sides only")
        strides = node.get("strides") or [1] * len(node.get("kernel_shape"))
        if any(map(int.__lt__, node.get("kernel_shape"), strides)):
            raise NoForm("Caffe2 rounds up with kernels that are at least the stride only")
        given |= {"legacy_pad": 3, "pad": pads[0]}
    return given


CONVERTERS.update(
    {
        "Flatten": lambda node: node.emit("Flatten", axis=node.axis(1)),
        "Transpose": lambda node: node.emit("Transpose", axes=node.get("perm")),
        "Concat": lambda node: node.emit(
            "Concat", node.inputs, [node.outputs[0], node.rest()], axis=node.axis(1)
        ),
        "Gather": lambda node: node.emit("Gather", axis=node.axis(0), wrap_indices=1),
        "Conv": lambda node: node.emit("Conv", group=node.get("group"), **_windows(node)),
        "GlobalAveragePool": lambda node: node.emit("AveragePool", global_pooling=1),
        "GlobalMaxPool": lambda node: node.emit("MaxPool", global_pooling=1),
        "InstanceNormalization": lambda node: node.emit(
            "InstanceNorm", epsilon=float(node.get("epsilon", 1e-5))
        ),
    }
)


@converts("ConvTranspose")
def _conv_transpose(node: Node) -> None:
    if "output_shape" in node.attributes or set(node.get("dilations") or [1]) != {1}:
        raise NoForm("Caffe2 has no output_shape and no dilations of it")
    windows = _windows(node)
    if "legacy_pad" in windows:
        raise NoForm("Caffe2 has no auto_pad of it")
    windows.pop("dilations")
    node.emit("ConvTranspose", group=node.get("group"), adjs=node.get("output_padding"), **windows)


@converts("MaxPool", "AveragePool", "LpPool")
def _pool(node: Node) -> None:
    node.allow(storage_order=0)
    windows = _windows(node)
    if node.kind != "MaxPool" and set(node.get("dilations") or [1]) != {1}:
        raise NoForm(f"Caffe2 has no dilations of {node.kind}")
    if node.kind == "AveragePool":
        if windows.get("legacy_pad") == 3 and (windows["pad"] or node.get("count_include_pad")):
            raise NoForm("Caffe2 has no mean that rounds up with padding")
        windows["count_include_pad"] = node.get("count_include_pad")
    elif node.kind == "LpPool":
        windows["p"] = float(node.get("p", 2))
    node.emit(node.kind, **windows)


@converts("Upsample", "Resize")
def _resize(node: Node) -> None:
    scales = _scales(node)
    if len(scales) != 4 or scales[0] != 1 or scales[1] != 1:
        raise NoForm("Caffe2 resizes height and width of images N x C x H x W only")
    mode = node.get("mode", "nearest")
    how = node.get("coordinate_transformation_mode", "half_pixel")
    if node.kind == "Upsample" or node.facts.version < 11:
        how = "asymmetric"
    whole = all(float(scale).is_integer() for scale in scales)
    floor = (
        node.kind == "Upsample" or node.facts.version < 11 or node.get("nearest_mode") == "floor"
    )
    sizes: dict[str, Any] = {"height_scale": float(scales[2]), "width_scale": float(scales[3])}
    if mode == "nearest" and (
        (how == "asymmetric" and floor) or (whole and how in ("half_pixel", "asymmetric"))
    ):
        if not floor and how == "asymmetric":
            raise NoForm("Caffe2 rounds places down only")
        node.emit("ResizeNearest", node.inputs[:1], **sizes)
    elif mode in ("linear", "bilinear") and how == "align_corners":
        node.emit("UpsampleBilinear", node.inputs[:1], **sizes)
    else:
        raise NoForm(f"Caffe2 has no mode={mode} with {how} places")


def _scales(node: Node) -> list[float]:
    if node.kind == "Upsample" or node.facts.version < 11:
        if "height_scale" in node.attributes:
            return [1.0, 1.0, node.get("height_scale"), node.get("width_scale")]
        return list(node.setting("scales", 1))
    scales = node.setting("scales", 2)
    if scales:
        return list(scales)
    sizes, shape = node.setting("sizes", 3), node.shape()
    if any(extent is None for extent in shape[2:]):
        raise NoForm("the size of its input is not known")
    return [1.0, 1.0, *map(_scale, map(int, sizes[2:]), map(int, shape[2:]))]  # type: ignore[arg-type]


def _scale(size: int, extent: int) -> float:
    """Return the 32-bit number whose product with an extent is `size`, rounded down."""
    scale = np.float32(size / extent)
    return float(
        scale if int(extent * float(scale)) == size else np.nextafter(scale, np.float32(np.inf))
    )


@converts("BatchNormalization")
def _batch_normalization(node: Node) -> None:
    node.allow(spatial=1, training_mode=0)
    node.emit("SpatialBN", node.inputs[:5], is_test=1, epsilon=float(node.get("epsilon", 1e-5)))


@converts("LayerNormalization")
def _layer_normalization(node: Node) -> None:
    axis, epsilon = node.axis(-1), float(node.get("epsilon", 1e-5))
    outputs = [node.facts.fresh(f"{node.outputs[0]}/norm"), node.rest(), node.rest()]
    scaled = node.emit("LayerNorm", node.inputs[:1], outputs, axis=axis, epsilon=epsilon)
    if 2 in node:
        node.emit("Add", [node.step("Mul", [scaled, node.inputs[1]]), node.inputs[2]])
    else:
        node.emit("Mul", [scaled, node.inputs[1]])


@converts("LRN")
def _lrn(node: Node) -> None:
    node.emit(
        "LRN",
        outputs=[node.outputs[0], node.rest()],
        size=node.get("size"),
        alpha=float(node.get("alpha", 1e-4)),
        beta=float(node.get("beta", 0.75)),
        bias=float(node.get("bias", 1.0)),
    )


@converts("Softmax", "LogSoftmax")
def _softmax(node: Node) -> None:
    outputs = node.outputs
    if node.kind != "Softmax":
        outputs = [node.facts.fresh(f"{node.outputs[0]}/softmax")]
    axis = node.axis(-1 if node.facts.version >= 13 else 1)
    rank = len(node.shape()) if node.facts.version >= 13 and axis >= 0 else 0
    if axis < 0 or node.facts.version < 13 or axis == rank - 1:
        node.emit("Softmax", outputs=outputs, axis=axis)
    else:
        swapped = list(range(rank))
        swapped[axis], swapped[-1] = swapped[-1], axis
        inner = node.step("Transpose", node.inputs, axes=swapped)
        inner = node.step("Softmax", [inner], axis=rank - 1)
        node.emit("Transpose", [inner], outputs, axes=swapped)
    if node.kind == "LogSoftmax":
        node.emit("Log", outputs)
