"""Workspaces, blobs and tensors for `workspace.C` and operators written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, DeviceOption, NetDef, OperatorDef, PlanDef
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.net import Net
from poseidon.caffe2.runtime.values import (
    TORCH_OF,
    Blob,
    deserialize,
    from_value,
    serialize,
    to_value,
)
from poseidon.caffe2.runtime.workspace import Workspace, run_plan


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
        """Give the tensor a shape; values stay if their number does, new ones are float32."""
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
            raise EnforceNotMet(f"A tensor of type {data_type} cannot be set from Python")
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


class WorkspaceView:
    """A workspace; without an argument a new one of its own."""

    def __init__(self, workspace: Workspace | None = None) -> None:
        self._workspace = Workspace() if workspace is None else workspace

    @property
    def blobs(self) -> dict[str, BlobView]:
        return {name: BlobView(name, blob) for name, blob in self._workspace.blobs.items()}

    @property
    def nets(self) -> dict[str, Net]:
        return dict(self._workspace.nets)

    def create_blob(self, name: str) -> BlobView:
        """Return the blob of a name, made where there is none."""
        return BlobView(name, self._workspace.create(name))

    def has_blob(self, name: str) -> bool:
        """Return whether there is a blob of a name, here or in the workspace around."""
        return self._workspace.find(name) is not None

    def remove_blob(self, name: str) -> None:
        self._workspace.blobs.pop(name, None)

    def fetch_blob(self, name: str) -> Any:
        return BlobView(name, self._workspace.get(name)).fetch()

    def create_net(self, net: Any, overwrite: bool = False) -> Net:
        """Compile a net, given as a net or a NetDef.

        Raises:
            TypeError: it is neither.
        """
        return self._workspace.create_net(_proto(net, NetDef), overwrite)

    def run(self, runnable: Any) -> None:
        """Run a net, an operator or a plan once.

        Raises:
            TypeError: it has a different type.
        """
        proto = _proto(runnable, NetDef, OperatorDef, PlanDef)
        if isinstance(proto, NetDef):
            self._workspace.run_once(proto)
        elif isinstance(proto, OperatorDef):
            self._workspace.run_operator(proto)
        else:
            run_plan(proto, self._workspace)


def _proto(given: Any, *kinds: type) -> Any:
    proto = given.Proto() if hasattr(given, "Proto") else given
    if not isinstance(proto, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(given).__name__} is not a {names}")
    return proto
