"""A scale and a bias for each column."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.modeling import initializers
from poseidon.caffe2.modeling.parameter_info import ParameterTags


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
