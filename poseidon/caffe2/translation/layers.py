"""The translators: a function for each type of layer.

Blobs of parameters have the names of Caffe2's translator: `<top>_w`, `<top>_b`, and so on. Labels
are integers, one for each example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.layers.base import LayerError, canonical_axis
from poseidon.caffe.layers.convolution import window
from poseidon.caffe.layers.pooling import pair, rounds_up
from poseidon.caffe.proto.caffe_pb2 import (
    EltwiseParameter,
    LayerParameter,
    LossParameter,
    LRNParameter,
    PoolingParameter,
    ReductionParameter,
)
from poseidon.caffe2.operators.layers.windows import CAFFE
from poseidon.caffe2.proto.caffe2_pb2 import OperatorDef, TensorProto
from poseidon.caffe2.translation.registry import (
    AddArgument,
    BaseTranslate,
    Shapes,
    TranslatorRegistry,
)
from poseidon.caffe2.utils import NumpyArrayToCaffe2Tensor

Blobs = Sequence[NDArray[np.float32]]
Translation = tuple[OperatorDef | list[OperatorDef], list[TensorProto]]
register = TranslatorRegistry.Register


def _operator(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: Any
) -> OperatorDef:
    op = OperatorDef(type=kind, input=inputs, output=outputs)
    for name, value in arguments.items():
        AddArgument(op, name, value)
    return op


def _refuse(wrong: bool, what: str) -> None:
    """Raise LayerError where a setting has no translation."""
    if wrong:
        raise LayerError(f"{what} cannot be translated")


def _first(blobs: Blobs, count: int) -> Blobs:
    """Return the first blobs of a layer; raise LayerError where the model lacks them."""
    found = [blob for blob in blobs if blob is not None]
    if len(found) < count:
        raise LayerError(f"the trained model has {len(found)} of its blobs, expected {count}")
    return found[:count]


def _check_outputs(found: int, wanted: int) -> None:
    if found != wanted:
        raise LayerError(f"the trained model has {found} outputs, num_output is {wanted}")


def _add_parameter(op: OperatorDef, suffix: str, values: NDArray[np.float32]) -> TensorProto:
    """Make a parameter the next input of an operator."""
    name = f"{op.output[0]}{suffix}"
    op.input.append(name)
    return NumpyArrayToCaffe2Tensor(values, name)


def _add_sizes(op: OperatorDef, name: str, sizes: Sequence[int]) -> None:
    """Add the sizes by axis as one number where they are equal, else as a list."""
    if len(set(sizes)) == 1:
        AddArgument(op, name, sizes[0])
    else:
        AddArgument(op, f"{name}s", [*sizes, *sizes] if name == "pad" else list(sizes))


@register("Input", "Data", "ImageData", "HDF5Data", "MemoryData", "WindowData", "DummyData")
@register("Silence")
def nothing(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    return [], []


SIMPLE = {"AbsVal": "Abs", "BNLL": "Softplus", "Sigmoid": "Sigmoid", "TanH": "Tanh"}
"""Layers without settings and blobs."""


@register(*SIMPLE)
def simple(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    return BaseTranslate(layer, SIMPLE[layer.type]), []


@register("Convolution", "Deconvolution")
def convolution(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.convolution_param
    _refuse(param.axis != 1, f"axis: {param.axis}")
    _refuse(len(layer.bottom) > 1, "several bottoms")
    transposed = layer.type == "Deconvolution"
    weight, *bias = _first(blobs, 1 + param.bias_term)
    outputs = weight.shape[1] * param.group if transposed else weight.shape[0]
    _check_outputs(outputs, param.num_output)
    sizes = window(param, weight.ndim - 2)
    _refuse(transposed and max(sizes.dilation) > 1, "a dilation")
    op = BaseTranslate(layer, "ConvTranspose" if transposed else "Conv")
    _add_sizes(op, "stride", sizes.stride)
    _add_sizes(op, "pad", sizes.pad)
    _add_sizes(op, "kernel", sizes.kernel)
    if max(sizes.dilation) > 1:
        _add_sizes(op, "dilation", sizes.dilation)
    if param.group > 1:
        AddArgument(op, "group", param.group)
    params = [_add_parameter(op, "_w", weight)]
    params += [_add_parameter(op, "_b", values.reshape(-1)) for values in bias]
    return op, params


@register("Pooling")
def pooling(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.pooling_param
    _refuse(param.pool == PoolingParameter.STOCHASTIC, "pool: STOCHASTIC")
    _refuse(len(layer.top) > 1, "a second top")
    mean = param.pool == PoolingParameter.AVE
    op = BaseTranslate(layer, "AveragePool" if mean else "MaxPool")
    if param.global_pooling:
        AddArgument(op, "global_pooling", 1)
        return op, []
    kernel = pair(param, "kernel_size", "kernel", None)
    stride, pad = pair(param, "stride", "stride", 1), pair(param, "pad", "pad", 0)
    legacy = rounds_up(param) and max(stride) > 1
    _add_sizes(op, "stride", stride)
    _add_sizes(op, "kernel", kernel)
    if legacy:
        AddArgument(op, "legacy_pad", CAFFE)
    if not (mean and any(pad)):
        _add_sizes(op, "pad", pad)
        return op, []
    # Caffe's mean counts the zeros of the padding, and not what lies behind them.
    if not legacy:
        _add_sizes(op, "pad", pad)
        AddArgument(op, "count_include_pad", 1)
        return op, []
    inside = all(k >= s + p for k, s, p in zip(kernel, stride, pad, strict=True))
    _refuse(not inside, "pool: AVE with a kernel smaller than stride and pad together")
    padded = f"_{layer.top[0]}_padded"
    border = _operator("PadImage", layer.bottom, [padded], pads=[*pad, *pad])
    op.input[0] = padded
    return [border, op], []


@register("LRN")
def lrn(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.lrn_param
    _refuse(param.norm_region != LRNParameter.ACROSS_CHANNELS, "norm_region: WITHIN_CHANNEL")
    scale = f"_{layer.top[0]}_scale"
    return _operator(
        "LRN",
        layer.bottom,
        [layer.top[0], scale],
        size=param.local_size,
        alpha=param.alpha,
        beta=param.beta,
        bias=param.k,
    ), []


@register("InnerProduct")
def inner_product(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.inner_product_param
    _refuse(param.axis < 1, f"axis: {param.axis}")
    weight, *bias = _first(blobs, 1 + param.bias_term)
    matrix = weight.reshape(weight.shape[-2:])
    matrix = np.ascontiguousarray(matrix.T) if param.transpose else matrix
    _check_outputs(len(matrix), param.num_output)
    values = bias[0].reshape(-1) if bias else np.zeros(len(matrix), np.float32)
    op = BaseTranslate(layer, "FC")
    if param.axis > 1:
        AddArgument(op, "axis", param.axis)
    return op, [_add_parameter(op, "_w", matrix), _add_parameter(op, "_b", values)]


@register("ReLU")
def relu(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    slope = layer.relu_param.negative_slope
    if not slope:
        return BaseTranslate(layer, "Relu"), []
    return _operator("LeakyRelu", layer.bottom, layer.top, alpha=slope), []


@register("ELU")
def elu(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    return _operator("Elu", layer.bottom, layer.top, alpha=layer.elu_param.alpha), []


@register("PReLU")
def prelu(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    (slope,) = _first(blobs, 1)
    op = BaseTranslate(layer, "PRelu")
    return op, [_add_parameter(op, "_Slope", slope.reshape(-1))]


@register("Dropout")
def dropout(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.dropout_param
    _refuse(not param.scale_train, "scale_train: false")
    op = BaseTranslate(layer, "Dropout")
    op.output.append(f"_{layer.top[0]}_mask")
    AddArgument(op, "ratio", param.dropout_ratio)
    if is_test:
        AddArgument(op, "is_test", 1)
    return op, []


@register("Softmax")
def softmax(
    layer: LayerParameter, blobs: Blobs, is_test: bool, *, shape: Shapes, **_: Any
) -> Translation:
    """Caffe2's softmax is over all axes from `axis` on; in images the classes go last for it."""
    axis, extents = layer.softmax_param.axis, shape(layer.bottom[0]) if shape else None
    if extents is not None:
        axis = canonical_axis(axis, extents)
    if extents is None or math.prod(extents[axis + 1 :]) == 1:
        return _operator("Softmax", layer.bottom, layer.top, axis=axis), []
    last = f"_{layer.top[0]}_last"
    order = list(range(len(extents)))
    order[axis], order[-1] = order[-1], order[axis]
    return [
        _operator("Transpose", layer.bottom, [last], axes=order),
        _operator("Softmax", [last], [last], axis=len(extents) - 1),
        _operator("Transpose", [last], layer.top, axes=order),
    ], []


@register("SoftmaxWithLoss")
def softmax_with_loss(
    layer: LayerParameter, blobs: Blobs, is_test: bool, *, shape: Shapes, **_: Any
) -> Translation:
    param, extents = layer.loss_param, shape(layer.bottom[0]) if shape else ()
    _refuse(param.HasField("ignore_label"), "ignore_label")
    _refuse(
        param.normalization in (LossParameter.NONE, LossParameter.PRE_FIXED), "this normalization"
    )
    _refuse(layer.softmax_param.axis != 1, f"axis: {layer.softmax_param.axis}")
    _refuse(math.prod(extents[2:]) > 1, "a loss by pixels")
    scores, labels = layer.bottom
    probabilities = layer.top[1] if len(layer.top) > 1 else f"{scores}_translator_autogen_softmax"
    losses = f"{scores}_translator_autogen_xent"
    return [
        _operator("Softmax", [scores], [probabilities]),
        _operator("LabelCrossEntropy", [probabilities, labels], [losses]),
        _operator("AveragedLoss", [losses], layer.top[:1]),
    ], []


@register("Accuracy")
def accuracy(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.accuracy_param
    _refuse(param.HasField("ignore_label"), "ignore_label")
    _refuse(len(layer.top) > 1, "a second top")
    _refuse(param.axis != 1, f"axis: {param.axis}")
    op = BaseTranslate(layer, "Accuracy")
    if param.top_k > 1:
        AddArgument(op, "top_k", param.top_k)
    return op, []


@register("Split")
def split(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    return [_operator("Copy", layer.bottom, [top]) for top in layer.top], []


@register("Concat")
def concat(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.concat_param
    axis = param.concat_dim if param.HasField("concat_dim") else param.axis
    return _operator("Concat", layer.bottom, [layer.top[0], f"_{layer.top[0]}_dims"], axis=axis), []


@register("Slice")
def slice_(
    layer: LayerParameter, blobs: Blobs, is_test: bool, *, shape: Shapes, **_: Any
) -> Translation:
    param = layer.slice_param
    axis = param.slice_dim if param.HasField("slice_dim") else param.axis
    op = _operator("Split", layer.bottom, layer.top, axis=axis)
    if param.slice_point:
        extents = shape(layer.bottom[0])
        points = [0, *param.slice_point, extents[canonical_axis(axis, extents)]]
        AddArgument(op, "split", np.diff(points).tolist())
    return op, []


@register("Eltwise")
def eltwise(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param, (top,) = layer.eltwise_param, layer.top
    if param.operation == EltwiseParameter.MAX:
        return BaseTranslate(layer, "Max"), []
    if param.operation == EltwiseParameter.SUM:
        if all(factor == 1 for factor in param.coeff):
            return BaseTranslate(layer, "Sum"), []
        scaled = [f"_{top}_{index}" for index in range(len(layer.bottom))]
        parts = zip(layer.bottom, scaled, param.coeff, strict=True)
        ops = [_operator("Scale", [x], [y], scale=factor) for x, y, factor in parts]
        return [*ops, _operator("Sum", scaled, [top])], []
    first, *others = layer.bottom
    steps = [f"_{top}_{index}" for index in range(len(others) - 1)]
    products = zip([first, *steps], others, [*steps, top], strict=True)
    return [_operator("Mul", [x, y], [product]) for x, y, product in products], []


@register("BatchNorm")
def batch_norm(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    """Caffe has sums of means and variances, and their weight."""
    param = layer.batch_norm_param
    fixed = param.use_global_stats if param.HasField("use_global_stats") else is_test
    mean, variance, weight = (blob.reshape(-1) for blob in _first(blobs, 3))
    factor = np.float32(0 if weight[0] == 0 else 1 / weight[0])
    op = BaseTranslate(layer, "SpatialBN")
    AddArgument(op, "is_test", int(fixed))
    AddArgument(op, "epsilon", param.eps)
    params = [
        _add_parameter(op, "_scale", np.ones_like(mean)),
        _add_parameter(op, "_bias", np.zeros_like(mean)),
        _add_parameter(op, "_mean", mean * factor),
        _add_parameter(op, "_var", variance * factor),
    ]
    if not fixed:
        AddArgument(op, "momentum", param.moving_average_fraction)
        saved = [f"{layer.top[0]}_saved_mean", f"{layer.top[0]}_saved_var"]
        op.output.extend([*op.input[3:5], *saved])
    return op, params


@register("Scale", "Bias")
def scale(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    """Translate a factor or summand: a blob or the second bottom, over axes from `axis` on."""
    param: Any = layer.scale_param if layer.type == "Scale" else layer.bias_param
    _refuse(param.axis < 0, f"axis: {param.axis}")
    learned, biased = len(layer.bottom) == 1, layer.type == "Scale" and param.bias_term
    operands = _first(blobs, learned + biased)
    kind = "Mul" if layer.type == "Scale" else "Add"
    suffix = "scale_w" if layer.type == "Scale" else "scale_b"
    op = _operator(kind, layer.bottom, layer.top, broadcast=1, axis=param.axis)
    params = [_add_parameter(op, suffix, operands[0])] if learned else []
    if not biased:
        return op, params
    add = _operator("Add", [f"{layer.top[0]}_internal"], layer.top, broadcast=1, axis=param.axis)
    params.append(_add_parameter(add, "scale_b", operands[-1]))
    op.output[0] = add.input[0]
    return [op, add], params


@register("Reshape")
def reshape(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.reshape_param
    _refuse(param.axis < 0, f"axis: {param.axis}")
    _refuse(param.num_axes != -1, f"num_axes: {param.num_axes}")
    return _reshaped(layer, [0] * param.axis + list(param.shape.dim)), []


@register("Flatten")
def flatten(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.flatten_param
    _refuse(param.axis < 0, f"axis: {param.axis}")
    _refuse(param.end_axis != -1, f"end_axis: {param.end_axis}")
    if param.axis == 1:
        return BaseTranslate(layer, "Flatten"), []
    return _reshaped(layer, [0] * param.axis + [-1]), []


def _reshaped(layer: LayerParameter, shape: Sequence[int]) -> OperatorDef:
    outputs = [layer.top[0], f"_{layer.top[0]}_dims"]
    return _operator("Reshape", layer.bottom, outputs, shape=shape)


@register("Crop")
def crop(
    layer: LayerParameter, blobs: Blobs, is_test: bool, *, shape: Shapes, **_: Any
) -> Translation:
    param, (image, like) = layer.crop_param, layer.bottom
    wanted = shape(like)
    axis = canonical_axis(param.axis, wanted)
    offsets = list(param.offset) or [0]
    offsets = offsets * (len(wanted) - axis) if len(offsets) == 1 else offsets
    ends = [first + size for first, size in zip(offsets, wanted[axis:], strict=True)]
    starts = [0] * axis + offsets
    return _operator("Slice", [image], layer.top, starts=starts, ends=[-1] * axis + ends), []


@register("Reduction")
def reduction(
    layer: LayerParameter, blobs: Blobs, is_test: bool, *, shape: Shapes, **_: Any
) -> Translation:
    param, (bottom,), (top,) = layer.reduction_param, layer.bottom, layer.top
    ops, mean = [], param.operation == ReductionParameter.MEAN
    first = {ReductionParameter.ASUM: "Abs", ReductionParameter.SUMSQ: "Sqr"}.get(param.operation)
    if first:
        ops, bottom = [_operator(first, [bottom], [f"_{top}_values"])], f"_{top}_values"
    if param.axis == 0:
        ops.append(_operator("SumElements", [bottom], [top], average=int(mean)))
    else:
        extents = shape(layer.bottom[0]) if param.axis > 0 else ()
        kind = "ReduceBackMean" if mean else "ReduceBackSum"
        ops.append(_operator(kind, [bottom], [top], num_reduce_dim=len(extents) - param.axis))
    if param.coeff != 1:
        ops.append(_operator("Scale", [top], [top], scale=param.coeff))
    return ops, []


@register("ROIPooling")
def roi_pooling(layer: LayerParameter, blobs: Blobs, is_test: bool, **_: Any) -> Translation:
    param = layer.roi_pooling_param
    op = BaseTranslate(layer, "RoIPool")
    for name in ("pooled_h", "pooled_w", "spatial_scale"):
        AddArgument(op, name, getattr(param, name))
    if is_test:
        AddArgument(op, "is_test", 1)
    else:
        op.output.append(f"{layer.top[0]}_argmaxes")
    return op, []
