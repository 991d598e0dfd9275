"""Other shapes for the same values: reshaped, joined, cut, gathered, padded."""

from __future__ import annotations

from typing import Any

import numpy as np

from poseidon.caffe.export.graph import onnx_module
from poseidon.caffe2.onnx.nodes import Node, NoForm, converts
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


@converts("Flatten")
def _flatten(node: Node) -> None:
    node.emit("Flatten", axis=node.axis(1))


@converts("Transpose")
def _transpose(node: Node) -> None:
    node.emit("Transpose", axes=node.get("perm"))


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
    node.emit(
        "Squeeze" if node.kind == "Squeeze" else "ExpandDims", node.inputs[:1], dims=sorted(axes)
    )


@converts("Concat")
def _concat(node: Node) -> None:
    node.emit("Concat", node.inputs, [node.outputs[0], node.rest()], axis=node.axis(1))


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


@converts("Gather")
def _gather(node: Node) -> None:
    node.emit("Gather", axis=node.axis(0), wrap_indices=1)


@converts("ConstantOfShape")
def _constant_of_shape(node: Node) -> None:
    value = node.get("value")
    array = np.zeros(1, np.float32) if value is None else onnx_module().numpy_helper.to_array(value)
    names = {
        "float32": "FLOAT",
        "float64": "DOUBLE",
        "int64": "INT64",
        "int32": "INT32",
        "bool": "BOOL",
    }
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
