"""Pooling layers."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.helpers.operators import adds_with_engine

max_pool = adds_with_engine("max_pool", "MaxPool")
average_pool = adds_with_engine("average_pool", "AveragePool")


def max_pool_with_index(
    model: Any, blob_in: Any, blob_out: Any, order: str = "NCHW", **kwargs: Any
) -> Any:
    """Add `MaxPoolWithIndex`; its second output is `<blob_out>_index`."""
    return model.net.MaxPoolWithIndex(
        blob_in, [blob_out, blob_out + "_index"], order=order, **kwargs
    )[0]
