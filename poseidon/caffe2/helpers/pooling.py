"""Pooling layers."""

from __future__ import annotations

from typing import Any


def max_pool(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    use_cudnn: bool = False,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `MaxPool`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.MaxPool(blob_in, blob_out, order=order, **kwargs)


def average_pool(
    model: Any,
    blob_in: Any,
    blob_out: Any,
    use_cudnn: bool = False,
    order: str = "NCHW",
    **kwargs: Any,
) -> Any:
    """Add `AveragePool`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.AveragePool(blob_in, blob_out, order=order, **kwargs)


def max_pool_with_index(
    model: Any, blob_in: Any, blob_out: Any, order: str = "NCHW", **kwargs: Any
) -> Any:
    """Add `MaxPoolWithIndex`; its second output is `<blob_out>_index`."""
    return model.net.MaxPoolWithIndex(
        blob_in, [blob_out, blob_out + "_index"], order=order, **kwargs
    )[0]
