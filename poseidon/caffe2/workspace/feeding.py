"""The blobs of the current workspace: feeding, fetching, serialization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from poseidon.caffe2 import scope
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.blob import is_tensor
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.serialization import deserialize, serialize
from poseidon.caffe2.runtime.values import from_proto, from_value, to_value
from poseidon.caffe2.workspace.current import current, log
from poseidon.caffe2.workspace.nets import StringifyBlobName, parsed


def Blobs() -> list[str]:
    return sorted(current().blobs)


def HasBlob(name: Any) -> bool:
    return current().find(StringifyBlobName(name)) is not None


def CreateBlob(name: Any) -> None:
    """Make an empty blob where there is none."""
    current().create(StringifyBlobName(name))


def ResetBlob(name: Any) -> None:
    """Empty a blob.

    Raises:
        RuntimeError: there is none of this name.
    """
    current().get(StringifyBlobName(name)).value = None


def RemoveBlob(name: Any) -> None:
    """Remove a blob from the current workspace; nets that use it keep it."""
    current().blobs.pop(StringifyBlobName(name), None)


def FeedBlob(name: Any, arr: Any, device_option: caffe2_pb2.DeviceOption | None = None) -> bool:
    """Set a blob.

    Args:
        name: the blob; it is made where there is none.
        arr: a numpy array (it is copied), a torch tensor (it is shared on the same device), a
            TensorProto, a string.
        device_option: where the tensor lies; by default the current device scope.

    Raises:
        RuntimeError: a blob cannot hold the value.
    """
    option = device_option if device_option is not None else scope.CurrentDeviceScope()
    device = torch.device("cpu") if option is None else device_of(option)
    if isinstance(arr, caffe2_pb2.TensorProto):
        arr = from_proto(arr)
    if isinstance(arr, np.ndarray) and arr.dtype == np.float64 and device.type == "cuda":
        log.warning(
            "CUDA operators do not support 64-bit doubles, please use arr.astype(np.float32) or "
            "np.int32 for ints. Blob: %s type: %s",
            name,
            arr.dtype,
        )
    blob, value = current().create(StringifyBlobName(name)), to_value(arr, device)
    old = blob.value
    if (
        getattr(old, "is_shared_buffer", False)
        and old.shape == value.shape
        and old.dtype == value.dtype
    ):
        old.copy_(value)  # the result of UnsafeCoalesce: other blobs lie in it
    else:
        blob.value = value
    return True


def FetchBlob(name: Any) -> Any:
    """Return a blob: an array of its own, the bytes of a string, or a sentence about any other
    object.

    Raises:
        RuntimeError: there is none of this name.
    """
    plain = StringifyBlobName(name)
    return from_value(plain, current().get(plain).value)


def FetchBlobs(names: Iterable[Any]) -> list[Any]:
    return [FetchBlob(name) for name in names]


def FetchTorch(name: Any) -> torch.Tensor:
    """Return the tensor of a blob itself.

    Raises:
        RuntimeError: there is no such blob, or it holds no tensor of numbers.
    """
    value = current().get(StringifyBlobName(name)).value
    if not isinstance(value, torch.Tensor):
        raise EnforceNotMet(f"The blob {name} holds no tensor of numbers")
    return value


def GetBlobSizeBytes(name: Any) -> int:
    """Return the bytes of a tensor; a string counts 32 bytes and its length."""
    value = current().get(StringifyBlobName(name)).value
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if is_tensor(value):
        return sum(32 + len(text) for text in value.reshape(-1).tolist())
    return len(value) if isinstance(value, bytes) else 0


def GetNameScope() -> str:
    """Return the prefix of names."""
    return scope.CurrentNameScope()


class _BlobDict:
    """The blobs of the current workspace as a dictionary: `blobs["x"] = array`."""

    def __getitem__(self, key: Any) -> Any:
        return FetchBlob(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        FeedBlob(key, value)

    def __len__(self) -> int:
        return len(Blobs())

    def __iter__(self) -> Iterator[str]:
        return iter(Blobs())

    def __contains__(self, item: Any) -> bool:
        return HasBlob(item)

    def keys(self) -> list[str]:
        return Blobs()


blobs = _BlobDict()


def SerializeBlob(name: Any) -> bytes:
    """Return a blob as a BlobProto.

    Raises:
        RuntimeError: there is no such blob, or it holds neither a tensor nor a string.
    """
    plain = StringifyBlobName(name)
    (proto,) = serialize(plain, current().get(plain).value, -1)
    return proto.SerializeToString()


def DeserializeBlob(name: Any, serialized: bytes) -> None:
    """Set a blob to what a BlobProto holds.

    Raises:
        RuntimeError: the bytes do not encode a BlobProto.
    """
    message = parsed(caffe2_pb2.BlobProto, serialized)
    blob = current().create(StringifyBlobName(name))
    blob.value = deserialize(message, blob.value)
