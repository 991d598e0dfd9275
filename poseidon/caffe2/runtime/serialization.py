"""Blobs as BlobProto messages: what Save writes, Load reads, and SerializeBlob gives."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, TensorProto
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import from_proto, kind_of, number_of

CHUNK_SIZE = 1_000_000
"""Values in one message, as Caffe2 writes them."""
READERS: dict[str, Callable[[BlobProto], Any]] = {}
"""What makes an object of its message, by the type that the message names; see `Serializable`."""
MUTEX = "std::unique_ptr<std::mutex>"
"""The type of a mutex in messages. Its state is not saved: the one that is read is free."""
_LOCK = type(threading.Lock())
_FLOATING = {TensorProto.FLOAT: 3, TensorProto.DOUBLE: 9}
"""The field numbers of data that a message holds as it lies in memory."""


@runtime_checkable
class Serializable(Protocol):
    """An object other than a tensor that can be saved; its reader is in `READERS`."""

    def blob_type(self) -> str:
        """Return the type that the message names."""

    def fill_message(self, message: BlobProto) -> None:
        """Put the object into a message that has its name and type."""


def serialize(name: str, value: Any, chunk_size: int = 0) -> Iterator[BlobProto]:
    """Return a blob as messages: one, or several of at most `chunk_size` values each.

    Args:
        name: the blob's name in the messages.
        value: what the blob holds: a tensor, a plain string, a mutex, or a `Serializable`.
        chunk_size: 0 for Caffe2's own, -1 for one message.

    Raises:
        RuntimeError: the value has a different type.
    """
    if isinstance(value, bytes):
        yield BlobProto(name=name, type="std::string", content=value)
        return
    if isinstance(value, _LOCK):
        yield BlobProto(name=name, type=MUTEX, content=b"")
        return
    if isinstance(value, Serializable):
        message = BlobProto(name=name, type=value.blob_type())
        value.fill_message(message)
        yield message
        return
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        raise EnforceNotMet(f"The blob {name} of type {kind_of(value)} cannot be serialized")
    flat = value.reshape(-1) if isinstance(value, np.ndarray) else value.detach().cpu().reshape(-1)
    size = max(len(flat), 1) if chunk_size == -1 else chunk_size or CHUNK_SIZE
    for begin in range(0, max(len(flat), 1), size):
        part = flat[begin : begin + size]
        proto = BlobProto(name=name, type="Tensor")
        tensor = proto.tensor
        tensor.name = name
        tensor.dims.extend(value.shape)
        tensor.segment.begin, tensor.segment.end = begin, begin + len(part)
        tensor.data_type = number_of(value)  # type: ignore[assignment]
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            tensor.device_detail.device_type = 1
            tensor.device_detail.device_id = value.device.index or 0
        _fill(tensor, part)
        yield proto


def deserialize(proto: BlobProto, into: Any = None) -> Any:
    """Return the value of a message.

    Args:
        proto: the message.
        into: the value of the blob's earlier messages: a chunk of a tensor is written into it.

    Raises:
        RuntimeError: the message holds no tensor, no string, no mutex and no object that has a
            reader.
    """
    if proto.type in READERS:
        return READERS[proto.type](proto)
    if proto.HasField("tensor"):
        return _merged(proto.tensor, into)
    if proto.type == "std::string":
        return proto.content
    if proto.type == MUTEX:
        return threading.Lock()
    raise EnforceNotMet(f"A blob of type {proto.type} cannot be read")


def _fill(tensor: TensorProto, part: Any) -> None:
    kind = tensor.data_type
    if kind == TensorProto.STRING:
        tensor.string_data.extend(part.tolist())
    elif kind == TensorProto.FLOAT16:
        tensor.int32_data.extend((part.view(torch.int16).to(torch.int32) & 0xFFFF).tolist())
    elif kind in _FLOATING:
        # The bytes of the packed field: a list of a million numbers takes far longer.
        data = part.numpy().tobytes()
        tensor.MergeFromString(
            bytes([_FLOATING[kind] << 3 | 2]) + _varint(len(data)) + data if data else b""
        )
    else:
        field = tensor.int64_data if kind == TensorProto.INT64 else tensor.int32_data
        field.extend((part.to(torch.uint8) if kind == TensorProto.BOOL else part).tolist())


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _merged(tensor: TensorProto, into: Any) -> Any:
    total = int(np.prod(list(tensor.dims), dtype=np.int64))
    whole = not tensor.HasField("segment") or (tensor.segment.begin, tensor.segment.end) == (
        0,
        total,
    )
    if whole:
        return from_proto(tensor)
    part = copy.deepcopy(tensor)
    begin, end = tensor.segment.begin, tensor.segment.end
    part.dims[:] = [end - begin]
    values = from_proto(part)
    shape = tuple(tensor.dims)
    if into is None or tuple(into.shape) != shape or into.dtype != values.dtype:
        into = (
            np.full(shape, b"", dtype=object)
            if isinstance(values, np.ndarray)
            else torch.zeros(shape, dtype=values.dtype)
        )
    into.reshape(-1)[begin:end] = values
    return into
