"""Helpers that add one operator and no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
