"""Activations."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.modeling.initializers import Initializer


def relu(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    use_cudnn: bool = False,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `Relu`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Relu(blob_in, blob_out, order=order, **kwargs)


def tanh(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    use_cudnn: bool = False,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `Tanh`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Tanh(blob_in, blob_out, order=order, **kwargs)


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
