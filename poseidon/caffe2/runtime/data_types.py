"""The data types of tensors: Caffe2's number, torch's type, numpy's type."""

from __future__ import annotations

import numpy as np
import torch

from poseidon.caffe2.proto.caffe2_pb2 import TensorProto

TORCH_OF: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.INT32: torch.int32,
    TensorProto.BYTE: torch.uint8,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.INT16: torch.int16,
    TensorProto.INT64: torch.int64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.DOUBLE: torch.float64,
}
"""torch's type by the number of `TensorProto.DataType`; strings are numpy arrays and have none."""

NUMBER_OF: dict[torch.dtype, int] = {
    dtype: int(number) for number, dtype in TORCH_OF.items() if number != TensorProto.BYTE
}
"""The number of `TensorProto.DataType` by torch's type."""


def torch_type(number: int) -> torch.dtype:
    """Return torch's type by the number of `TensorProto.DataType`.

    Raises:
        ValueError: there are no tensors of that type.
    """
    if number not in TORCH_OF:
        known = ", ".join(f"{TensorProto.DataType.Name(kind)}={int(kind)}" for kind in TORCH_OF)
        raise ValueError(f"there are no tensors of the data type {number}; the types are {known}")
    return TORCH_OF[number]


def number_of(value: torch.Tensor | np.ndarray) -> int:
    """Return the data type number of a tensor of numbers or of strings."""
    return NUMBER_OF[value.dtype] if isinstance(value, torch.Tensor) else TensorProto.STRING
