"""Sums, products, transposition."""

from __future__ import annotations

from typing import Any

from poseidon.caffe2.helpers.operators import adds

sum = adds("sum", "Sum")  # noqa: A001 (Caffe2's name)
reduce_sum = adds("reduce_sum", "ReduceSum")
sub = adds("sub", "Sub")
add = adds("add", "Add")
mat_mul = adds("mat_mul", "MatMul")
arg_max = adds("arg_max", "ArgMax")
arg_min = adds("arg_min", "ArgMin")


def transpose(
    model: Any, blob_in: Any, blob_out: Any, use_cudnn: bool = False, **kwargs: Any
) -> Any:
    """Add `Transpose`."""
    if use_cudnn:
        kwargs["engine"] = "CUDNN"
    return model.net.Transpose(blob_in, blob_out, **kwargs)


def batch_mat_mul(
    model: Any, blob_in: Any, blob_out: Any, enable_tensor_core: bool = False, **kwargs: Any
) -> Any:
    """Add `BatchMatMul`."""
    if enable_tensor_core:
        kwargs["engine"] = "TENSORCORE"
    return model.net.BatchMatMul(blob_in, blob_out, **kwargs)
