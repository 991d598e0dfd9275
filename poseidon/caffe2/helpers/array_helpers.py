"""Concatenation."""

from __future__ import annotations

from typing import Any


def concat(model: Any, blobs_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `Concat`; the extents of the inputs are in `_<blob_out>_concat_dims`."""
    if kwargs.get("order") and kwargs.get("axis"):
        # Caffe2 allows only one of them; the axis is what the caller meant.
        kwargs.pop("order")
    return model.net.Concat(blobs_in, [blob_out, "_" + blob_out + "_concat_dims"], **kwargs)[0]


def depth_concat(model: Any, blobs_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Concatenate along the channels; `concat` does so too."""
    return concat(model, blobs_in, blob_out, **kwargs)
