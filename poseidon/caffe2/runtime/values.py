"""What a blob holds: its types, its values and how they are shown; and its message, the BlobProto that
Save writes, Load reads and SerializeBlob returns.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from poseidon.caffe.proto.blob import packed
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, TensorProto
from poseidon.caffe2.runtime.errors import EnforceNotMet


class Blob:
    """A slot.

    `value` is None while the blob is empty; see `operators.registry` for what it may hold.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value


def kind_of(value: Any) -> str:
    """Return the name of the type of a blob's value, in Caffe2's manner."""
    if value is None:
        return "nullptr (uninitialized)"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "Tensor"
    return "std::string" if isinstance(value, bytes) else type(value).__name__


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, of numbers or of strings."""
    return isinstance(value, (torch.Tensor, np.ndarray))


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


def as_bytes(text: Any) -> Any:
    """Return the bytes of a text; anything else as it is."""
    return text.encode(errors="surrogateescape") if isinstance(text, str) else text


def to_value(given: Any, device: torch.device) -> Any:
    """Return what a blob holds for a fed value: arrays are copied, torch tensors shared.

    Raises:
        RuntimeError: a value of this type cannot be fed.
    """
    if isinstance(given, (str, bytes)):
        return as_bytes(given)
    if isinstance(given, torch.Tensor):
        return given.detach().to(device) if given.requires_grad else given.to(device)
    if not isinstance(given, np.ndarray):
        raise EnforceNotMet(
            f"No feeder is registered for a value of type {type(given).__name__}: expected a numpy "
            "array, such as np.array(value), a torch tensor or a string"
        )
    if given.dtype.kind in "SUO":
        return _strings(given)
    try:
        return torch.from_numpy(np.array(given, given.dtype.newbyteorder("="), order="C")).to(
            device
        )
    except TypeError as error:
        raise EnforceNotMet(f"A numpy array of type {given.dtype} cannot be fed") from error


def from_value(name: str, value: Any) -> Any:
    """Return a blob's fetched value: an own array, a string, or a sentence on the object."""
    if isinstance(value, torch.Tensor):
        fetched: np.ndarray = value.detach().cpu().numpy()
        return fetched.copy() if value.device.type == "cpu" else fetched
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, bytes):
        return value
    return f"{name}, a C++ native class of type {kind_of(value)}.".encode()


def from_proto(proto: TensorProto) -> Any:
    """Return the tensor that a TensorProto holds, on the CPU.

    Raises:
        RuntimeError: its data type is not one that tensors have.
    """
    kind, shape = proto.data_type, tuple(proto.dims)
    if kind == TensorProto.STRING:
        return np.array(list(proto.string_data), dtype=object).reshape(shape)
    dtype = TORCH_OF.get(kind)
    if dtype is None:
        raise EnforceNotMet(f"A tensor of type {TensorProto.DataType.Name(kind)} cannot be read")
    return _numbers(proto, dtype).reshape(shape)


def _numbers(proto: TensorProto, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a TensorProto, a vector, from the field that it has."""
    if proto.data_format == TensorProto.FMT_BFLOAT16:
        return torch.frombuffer(bytearray(proto.raw_data), dtype=torch.bfloat16).to(dtype)
    if proto.raw_data:
        return torch.frombuffer(bytearray(proto.raw_data), dtype=dtype)
    if dtype == torch.float16:
        bits = torch.tensor(list(proto.int32_data), dtype=torch.int32)
        return bits.to(torch.int16).view(torch.float16)
    if proto.HasField("byte_data") and dtype.itemsize == 1:
        return torch.frombuffer(bytearray(proto.byte_data), dtype=dtype)
    values = proto.float_data or proto.double_data or proto.int64_data or proto.int32_data
    exact = np.float64 if dtype.is_floating_point else np.int64
    return torch.from_numpy(np.array(values, dtype=exact)).to(dtype)


def strings_of(items: Sequence[Any]) -> np.ndarray:
    """Return a tensor of strings, a vector; the items may be any other objects too."""
    strings = np.empty(len(items), dtype=object)
    strings[:] = items
    return strings


def joined(values: Sequence[Any]) -> Any:
    """Return one tensor of several, of numbers or of strings, along the first dimension."""
    numbers = isinstance(values[0], torch.Tensor)
    return torch.cat(list(values)) if numbers else np.concatenate(list(values))


def _strings(array: np.ndarray) -> np.ndarray:
    flat = [as_bytes(item) for item in array.reshape(-1).tolist()]
    for item in flat:
        if not isinstance(item, bytes):
            raise EnforceNotMet(f"A tensor of strings cannot hold a {type(item).__name__}")
    strings = strings_of(flat)
    return strings.reshape(array.shape)


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
        RuntimeError: the message holds no tensor, string, mutex or object that has a reader.
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
        tensor.MergeFromString(packed(bytes([_FLOATING[kind] << 3 | 2]), part.numpy()))
    else:
        field = tensor.int64_data if kind == TensorProto.INT64 else tensor.int32_data
        field.extend((part.to(torch.uint8) if kind == TensorProto.BOOL else part).tolist())


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
