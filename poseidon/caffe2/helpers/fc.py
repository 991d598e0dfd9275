"""Fully connected layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poseidon.caffe2.modeling import initializers
from poseidon.caffe2.modeling.parameter_info import ParameterTags


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
        kwargs: these by name, `WeightInitializer`, `BiasInitializer`, and arguments of the
            operator.
    """
    return _fc(model, model.net.FC, *args, **kwargs)


def packed_fc(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Add `PackedFC`; see `fc`."""
    return _fc(model, model.net.PackedFC, *args, **kwargs)
