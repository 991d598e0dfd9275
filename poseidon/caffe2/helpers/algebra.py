"""Sums, products, transposition."""

from __future__ import annotations

from typing import Any


def transpose(
    model: Any, blob_in: Any, blob_out: Any, use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """Add `Transpose`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Transpose(blob_in, blob_out, **kwargs)


def sum(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:  # noqa: A001 (Caffe2's name)
    """Add `Sum`."""
    return model.net.Sum(blob_in, blob_out, **kwargs)


def reduce_sum(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `ReduceSum`."""
    return model.net.ReduceSum(blob_in, blob_out, **kwargs)


def sub(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `Sub`."""
    return model.net.Sub(blob_in, blob_out, **kwargs)


def add(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    return model.net.Add(blob_in, blob_out, **kwargs)


def mat_mul(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `MatMul`."""
    return model.net.MatMul(blob_in, blob_out, **kwargs)


def batch_mat_mul(
    model: Any, blob_in: Any, blob_out: Any, enable_tensor_core: bool = False, **kwargs: Any
) -> Any:
    """Add `BatchMatMul`."""
    if enable_tensor_core:
        kwargs["engine"] = "TENSORCORE"
    return model.net.BatchMatMul(blob_in, blob_out, **kwargs)


def arg_max(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `ArgMax`."""
    return model.net.ArgMax(blob_in, blob_out, **kwargs)


def arg_min(model: Any, blob_in: Any, blob_out: Any, **kwargs: Any) -> Any:
    """Add `ArgMin`."""
    return model.net.ArgMin(blob_in, blob_out, **kwargs)
