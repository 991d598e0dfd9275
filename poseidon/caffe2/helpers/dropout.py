"""Dropout."""

from __future__ import annotations

from typing import Any


def dropout(model: Any, blob_in: Any, blob_out: Any, use_cudnn: bool = False, **kwargs: Any) -> Any:
    """Add `Dropout`; the mask is `_<blob_out>_mask`.

    Args:
        kwargs: `is_test`, which must be given, and `ratio`.
    """
    assert "is_test" in kwargs, "Argument 'is_test' is required"
    kwargs["engine"] = "CUDNN" if use_cudnn else "DEFAULT"
    return model.net.Dropout(blob_in, [blob_out, "_" + blob_out + "_mask"], **kwargs)[0]
