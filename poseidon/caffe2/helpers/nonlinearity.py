"""Activations."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.helpers.operators import adds_with_engine
from poseidon.caffe2.modeling.initializers import Initializer

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
