"""Helpers that add one operator, with its parameters if it has any: fully connected layers,
activations, pooling, dropout, sums and products, concatenation.

`brew` calls them by name: `brew.fc(model, "pool5", "fc6", 9216, 4096)`. A helper adds its operator to
`model.net`; a parameter of the layer `fc6` is called `fc6_w` or `fc6_b`, and its filler goes to
`model.param_init_net`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poseidon.caffe2.modeling import initializers
from poseidon.caffe2.modeling.initializers import Initializer
from poseidon.caffe2.modeling.parameter_info import ParameterTags


def adds(name: str, kind: str) -> Callable[..., Any]:
    """Return a helper, by its name and the type of its operator."""

    def helper(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
        return getattr(model.net, kind)(blob_in, blob_out, **kwargs)

    helper.__name__, helper.__doc__ = name, f"Add `{kind}`."
    return helper


def adds_with_engine(name: str, kind: str) -> Callable[..., Any]:
    """Return a helper whose operator is on images, and which cuDNN has too."""

    def helper(
        model: Any,
        blob_in: Any,
        blob_out: Any,
        use_cudnn: bool = False,
        order: str = "NCHW",
        **kwargs: Any,
    ) -> Any:
        if use_cudnn:
            kwargs["engine"] = "CUDNN"
        return getattr(model.net, kind)(blob_in, blob_out, order=order, **kwargs)

    helper.__name__, helper.__doc__ = name, f"Add `{kind}`."
    return helper


sum = adds("sum", "Sum")  # noqa: A001 (Caffe2's name)
reduce_sum = adds("reduce_sum", "ReduceSum")
sub = adds("sub", "Sub")
add = adds("add", "Add")
mat_mul = adds("mat_mul", "MatMul")
arg_max = adds("arg_max", "ArgMax")
arg_min = adds("arg_min", "ArgMin")


def transpose(
    model: Any, blob_in: Any, blob_out: Any, use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """Add `Transpose`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Transpose(blob_in, blob_out, **kwargs)


def batch_mat_mul(
    model: Any, blob_in: Any, blob_out: Any, enable_tensor_core: bool = False, **kwargs: Any
) -> Any:
    """Add `BatchMatMul`."""
    if enable_tensor_core:
        kwargs["engine"] = "TENSORCORE"
    return model.net.BatchMatMul(blob_in, blob_out, **kwargs)


relu = adds_with_engine("relu", "Relu")
tanh = adds_with_engine("tanh", "Tanh")


def prelu(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    num_channels: int = 1,
    slope_init: Any = None,
    **kwargs: Any,
) -> Any:
    """Add `PRelu`; its slopes start at 0.25."""
    name, arguments = slope_init or ("ConstantFill", {"value": 0.25})
    slope = model.create_param(blob_out + "_slope", [num_channels], Initializer(name, **arguments))
    return model.net.PRelu([blob_in, slope], [blob_out])


max_pool = adds_with_engine("max_pool", "MaxPool")
average_pool = adds_with_engine("average_pool", "AveragePool")


def max_pool_with_index(
    model: Any, blob_in: Any, blob_out: Any, order: str = "NCHW", **kwargs: Any
) -> Any:
    """Add `MaxPoolWithIndex`; its second output is `<blob_out>_index`."""
    return model.net.MaxPoolWithIndex(
        blob_in, [blob_out, blob_out + "_index"], order=order, **kwargs
    )[0]


def dropout(model: Any, blob_in: Any, blob_out: Any, use_cudnn: bool = False, **kwargs: Any) -> Any:
    """Add `Dropout`; the mask is `_<blob_out>_mask`.

    Args:
        kwargs: `is_test`, which must be given, and `ratio`.
    """
    assert "is_test" in kwargs, "Argument 'is_test' is required"
    kwargs["engine"] = "CUDNN" if use_cudnn else "DEFAULT"
    return model.net.Dropout(blob_in, [blob_out, "_" + blob_out + "_mask"], **kwargs)[0]


def concat(model: Any, blobs_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `Concat`; the extents of the inputs are in `_<blob_out>_concat_dims`."""
    if kwargs.get("order") and kwargs.get("axis"):
        # Caffe2 allows only one of them; the axis is what the caller meant.
        kwargs.pop("order")
    return model.net.Concat(blobs_in, [blob_out, "_" + blob_out + "_concat_dims"], **kwargs)[0]


def depth_concat(model: Any, blobs_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Concatenate along the channels; `concat` does so too."""
    return concat(model, blobs_in, blob_out, **kwargs)


def _fc(
    model: Any,
    op_call: Callable[..., Any],
    blob_in: Any,
    blob_out: Any,
    dim_in: int,
    dim_out: int,
    weight_init: Any = None,
    bias_init: Any = None,
    WeightInitializer: Any = None,
    BiasInitializer: Any = None,
    enable_tensor_core: bool = False,
    float16_compute: bool = False,
    **kwargs: Any,
) -> Any:
    weight_init = initializers.update_initializer(
        WeightInitializer, weight_init, ("XavierFill", {})
    )
    bias_init = initializers.update_initializer(BiasInitializer, bias_init, ("ConstantFill", {}))
    blob_out = blob_out or model.net.NextName()
    bias_tags = [ParameterTags.BIAS]
    if "freeze_bias" in kwargs:
        bias_tags.append(ParameterTags.COMPUTED_PARAM)
    weight = model.create_param(
        blob_out + "_w", [dim_out, dim_in], weight_init, ParameterTags.WEIGHT
    )
    bias = model.create_param(blob_out + "_b", [dim_out], bias_init, bias_tags)
    if enable_tensor_core:
        kwargs["engine"] = "TENSORCORE"
    if float16_compute:
        kwargs["float16_compute"] = True
    return op_call([blob_in, weight, bias], blob_out, **kwargs)


def fc(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Add `FC`: x W^T + b.

    Args:
        model: the model.
        args: blob_in, blob_out, dim_in, dim_out, weight_init, bias_init.
        kwargs: these, `WeightInitializer`, `BiasInitializer`, and arguments of the operator.
    """
    return _fc(model, model.net.FC, *args, **kwargs)


def packed_fc(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Add `PackedFC`; see `fc`."""
    return _fc(model, model.net.PackedFC, *args, **kwargs)


def elementwise_linear(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    dim: int,
    weight_init: Any = None,
    bias_init: Any = None,
    **kwargs: Any,
) -> Any:
    """Add `ElementwiseLinear`: x w + b; the weights start at 1, the biases at 0."""
    weight_init = initializers.update_initializer(
        None, weight_init, ("ConstantFill", {"value": 1.0})
    )
    bias_init = initializers.update_initializer(None, bias_init, ("ConstantFill", {"value": 0.0}))
    weight = model.create_param(blob_out + "_w", [dim], weight_init, ParameterTags.WEIGHT)
    bias = model.create_param(blob_out + "_b", [dim], bias_init, ParameterTags.BIAS)
    return model.net.ElementwiseLinear([blob_in, weight, bias], blob_out, **kwargs)
