"""Blobs as operators written in Python, and users of `workspace.C`, see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, DeviceOption
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.serialization import deserialize, serialize
from poseidon.caffe2.runtime.values import TORCH_OF, Blob, from_value, to_value


class TensorView:
    """The tensor of a blob; `data` is the memory itself."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    @property
    def data(self) -> Any:
        """The values as an array that shares the tensor's memory (a copy for a GPU's)."""
        value = self._blob.value
        if value is None:
            value = self._blob.value = torch.empty(0)
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; (0,) for an empty blob."""
        return (0,) if self._blob.value is None else tuple(self._blob.value.shape)

    _shape = shape

    def reshape(self, dims: Sequence[int]) -> None:
        """Give the tensor a shape; values stay where their number stays, new memory is of type
        float32 by default.
        """
        value = self._blob.value
        dims = [int(size) for size in dims]
        if isinstance(value, torch.Tensor) and value.numel() == int(np.prod(dims, dtype=np.int64)):
            self._blob.value = value.reshape(dims)
        else:
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
            self._blob.value = torch.empty(dims, dtype=dtype)

    def init(
        self, dims: Sequence[int], data_type: int, device_option: DeviceOption | None = None
    ) -> None:
        """Make a tensor of a shape and a data type.

        Raises:
            RuntimeError: the type is not one of numbers.
        """
        if data_type not in TORCH_OF:
            raise EnforceNotMet(
                f"A tensor of the data type {data_type} cannot be initialized from Python"
            )
        self._blob.value = torch.empty(
            list(dims), dtype=TORCH_OF[data_type], device=_device(device_option)
        )

    def feed(self, value: Any, device_option: DeviceOption | None = None) -> None:
        """Set the tensor to a copy of an array."""
        self._blob.value = to_value(value, _device(device_option))

    def fetch(self) -> Any:
        """Return a copy of the tensor as an array."""
        return from_value("", self._blob.value)


class BlobView:
    """A blob of a workspace."""

    def __init__(self, name: str, blob: Blob) -> None:
        self.name = name
        self._blob = blob

    def feed(self, value: Any, device_option: DeviceOption | None = None) -> bool:
        """Set the blob; see `workspace.FeedBlob`."""
        self._blob.value = to_value(value, _device(device_option))
        return True

    _feed = feed

    def fetch(self) -> Any:
        """Return the blob's value; see `workspace.FetchBlob`."""
        return from_value(self.name, self._blob.value)

    def tensor(self) -> TensorView:
        """Return the tensor; an empty blob gets one."""
        return TensorView(self._blob)

    def is_tensor(self) -> bool:
        return isinstance(self._blob.value, (torch.Tensor, np.ndarray))

    def as_tensor(self) -> TensorView:
        return self.tensor()

    def serialize(self, name: str) -> bytes:
        """Return the blob as a message of that name."""
        (proto,) = serialize(name, self._blob.value, -1)
        return proto.SerializeToString()

    def deserialize(self, serialized: bytes) -> None:
        """Set the blob to what a message holds."""
        self._blob.value = deserialize(BlobProto.FromString(serialized), self._blob.value)


def _device(option: DeviceOption | None) -> torch.device:
    return torch.device("cpu") if option is None else device_of(option)
