"""The blobs of the current workspace: feeding, fetching, serialization."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from poseidon.caffe2 import scope
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.proto.caffe2_pb2 import NetDef
from poseidon.caffe2.runtime.bind import device_of
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import (
    deserialize,
    from_proto,
    from_value,
    is_tensor,
    serialize,
    to_value,
)
from poseidon.caffe2.workspace.current import ResetWorkspace, WorkspaceGuard, current, log
from poseidon.caffe2.workspace.nets import RunOperatorOnce, StringifyBlobName, _net_def, parsed


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
        arr: a numpy array (copied), a torch tensor (shared on its device), a TensorProto, a string.
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
    """Return a blob: an own array, a string's bytes, or a sentence about any other object.

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
        raise EnforceNotMet(f"The blob {name} is not a tensor of numbers")
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


TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "uint8_t": torch.uint8,
    "unsigned char": torch.uint8,
    "int8_t": torch.int8,
    "int16_t": torch.int16,
    "uint16_t": torch.uint16,
    "int": torch.int32,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "long": torch.int64,
    "bool": torch.bool,
}
"""The types by the names that C++ gives them."""


def FillRandomNetworkInputs(
    net: Any, input_dims: Sequence[Sequence[Sequence[int]]], input_types: Sequence[Sequence[str]]
) -> None:
    """Feed what a net reads and does not make: fractions from 0 to 1, or whole numbers 0 and 1.

    Args:
        net: a net or its NetDef.
        input_dims: for each operator that reads such blobs a list: the shape of each.
        input_types: likewise their types, such as "float" and "int"; see `TYPES`.

    Raises:
        RuntimeError: there are not as many shapes and types as such operators and blobs, or none.
        ValueError: there is no type of a name.
    """
    readers = _outside(_net_def(net))
    if not readers:
        raise EnforceNotMet("the net reads no blob that it does not make")
    for what, given in (("shapes", input_dims), ("types", input_types)):
        _check(what, len(given), [f"{kind} reads {', '.join(names)}" for kind, names in readers])
        for (_, names), values in zip(readers, given, strict=True):
            _check(what, len(values), names)
    made = {}
    for (_, names), dims, types in zip(readers, input_dims, input_types, strict=True):
        for name, shape, kind in zip(names, dims, types, strict=True):
            made[name] = _random(list(shape), kind)
    for name, value in made.items():
        current().create(name).value = value


def _outside(net: NetDef) -> list[tuple[str, list[str]]]:
    """Return the operators that read blobs which none makes: their types and these blobs."""
    made = {name for op in net.op for name in op.output}
    found = [(op.type, [name for name in op.input if name not in made]) for op in net.op]
    return [(kind, names) for kind, names in found if names]


def _check(what: str, count: int, wanted: Sequence[str]) -> None:
    if count != len(wanted):
        names = "; ".join(wanted)
        raise EnforceNotMet(f"{count} {what} are given, {len(wanted)} expected: {names}")


def _random(shape: list[int], kind: str) -> torch.Tensor:
    if kind not in TYPES:
        raise ValueError(f"there is no type {kind!r}; the types are {', '.join(TYPES)}")
    dtype = TYPES[kind]
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return torch.randint(0, 2, shape).to(dtype)


WORKSPACE = "_CAFFE2_IMMEDIATE"


class _Mode:
    """Whether the mode is on, and the folder of its workspace."""

    active = False
    folder = ""


def IsImmediate() -> bool:
    """Return whether operators run as they are created."""
    return _Mode.active


def StartImmediate(i_know: bool = False) -> None:
    """Run operators as they are created; `i_know` silences the warning of experiments."""
    if IsImmediate():
        return
    _Mode.active = True
    with WorkspaceGuard(WORKSPACE):
        _Mode.folder = tempfile.mkdtemp()
        ResetWorkspace(_Mode.folder)
    if not i_know:
        log.warning(
            "Immediate mode: operators run as they are created, until StopImmediate(). For "
            "experiments only."
        )


def StopImmediate() -> None:
    """End the mode; its blobs are lost."""
    if not IsImmediate():
        return
    with WorkspaceGuard(WORKSPACE):
        ResetWorkspace()
    shutil.rmtree(_Mode.folder, ignore_errors=True)
    _Mode.folder = ""
    _Mode.active = False


def ImmediateBlobs() -> list[str]:
    """Return the names of the mode's blobs."""
    with WorkspaceGuard(WORKSPACE):
        return Blobs()


def RunOperatorImmediate(op: caffe2_pb2.OperatorDef) -> None:
    """Run an operator in the mode's workspace."""
    with WorkspaceGuard(WORKSPACE):
        RunOperatorOnce(op)


def FetchImmediate(*args: Any, **kwargs: Any) -> Any:
    """Return a blob of the mode's workspace; see `FetchBlob`."""
    with WorkspaceGuard(WORKSPACE):
        return FetchBlob(*args, **kwargs)


def FeedImmediate(*args: Any, **kwargs: Any) -> bool:
    """Set a blob of the mode's workspace; see `FeedBlob`."""
    with WorkspaceGuard(WORKSPACE):
        return FeedBlob(*args, **kwargs)
