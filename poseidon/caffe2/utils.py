"""Conversions between protobuf messages, numpy arrays and Python values."""

from __future__ import annotations

import copy
import functools
import pdb
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from poseidon.base.text_files import decoded
from poseidon.caffe.proto.blob import packed
from poseidon.caffe2 import workspace
from poseidon.caffe2.proto import caffe2_pb2
from poseidon.caffe2.runtime.values import as_bytes, from_proto, from_value

_FLOATS = (float, np.floating)
_INTS = (int, np.integer, np.bool_)


def MakeArgument(key: str, value: Any) -> caffe2_pb2.Argument:
    """Return an operator's argument for a Python value.

    Args:
        key: its name.
        value: a number, a string, a NetDef, another message (its bytes become the string), an
            array, or a list of values of one kind.

    Raises:
        ValueError: an argument cannot hold the value, e.g. None or a list of integers and floats.
    """
    argument = caffe2_pb2.Argument(name=key)
    if isinstance(value, np.ndarray):
        value = value.flatten().tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        argument.f = value
    elif isinstance(value, int):
        argument.i = int(value)
    elif isinstance(value, (str, bytes)):
        argument.s = as_bytes(value)
    elif isinstance(value, caffe2_pb2.NetDef):
        argument.n.CopyFrom(value)
    elif isinstance(value, Message):
        argument.s = value.SerializeToString()
    elif not (isinstance(value, Iterable) and _extend(argument, list(value))):
        raise ValueError(f"Unknown argument type: key={key} value={value} {type(value)}")
    return argument


def _extend(argument: caffe2_pb2.Argument, values: list[Any]) -> bool:
    if all(isinstance(value, _FLOATS) for value in values):
        argument.floats.extend(values)
    elif all(isinstance(value, _INTS) for value in values):
        argument.ints.extend(int(value) for value in values)
    elif all(isinstance(value, (str, bytes)) for value in values):
        argument.strings.extend(as_bytes(value) for value in values)
    elif all(isinstance(value, caffe2_pb2.NetDef) for value in values):
        argument.nets.extend(values)
    elif all(isinstance(value, Message) for value in values):
        argument.strings.extend(value.SerializeToString() for value in values)
    else:
        return False
    return True


def ArgsToDict(args: Iterable[caffe2_pb2.Argument]) -> dict[str, Any]:
    """Return arguments as a dictionary of Python values."""
    values: dict[str, Any] = {}
    for argument in args:
        present = [field.name for field, _ in argument.ListFields() if field.name != "name"]
        value = getattr(argument, present[0]) if present else []
        repeated = present and present[0] in ("floats", "ints", "strings", "tensors", "nets")
        values[argument.name] = list(value) if repeated else value
    return values


def OpAlmostEqual(
    op_a: Message, op_b: Message, ignore_fields: str | Iterable[str] | None = None
) -> bool:
    """Return whether two operators are equal but for some fields."""
    fields = [ignore_fields] if isinstance(ignore_fields, str) else list(ignore_fields or [])
    bare = []
    for op in (op_a, op_b):
        bare.append(copy.deepcopy(op))
        for name in fields:
            bare[-1].ClearField(name)
    return bool(bare[0] == bare[1])


def GetArgumentDict(op: Any) -> dict[str, Any]:
    return ArgsToDict(op.arg)


def CaffeBlobToNumpyArray(blob: Any) -> np.ndarray:
    """Return the array of a BlobProto of Caffe."""
    shape = (
        (blob.num, blob.channels, blob.height, blob.width) if blob.num else tuple(blob.shape.dim)
    )
    return np.asarray(blob.data, dtype=np.float32).reshape(shape)


def Caffe2TensorToNumpyArray(tensor: caffe2_pb2.TensorProto) -> np.ndarray:
    """Return the array of a TensorProto.

    Raises:
        RuntimeError: the data type is not one that arrays have.
    """
    array = from_value("", from_proto(tensor))
    assert isinstance(array, np.ndarray)
    return array


# Wire tag of TensorProto.float_data: field 3, length-delimited (packed).
_FLOAT_DATA_TAG = bytes([3 << 3 | 2])
_FIELDS: dict[str, tuple[int, str]] = {
    "float64": (caffe2_pb2.TensorProto.DOUBLE, "double_data"),
    "int64": (caffe2_pb2.TensorProto.INT64, "int64_data"),
    "int32": (caffe2_pb2.TensorProto.INT32, "int32_data"),
    "int16": (caffe2_pb2.TensorProto.INT16, "int32_data"),
    "uint16": (caffe2_pb2.TensorProto.UINT16, "int32_data"),
    "int8": (caffe2_pb2.TensorProto.INT8, "int32_data"),
    "uint8": (caffe2_pb2.TensorProto.UINT8, "int32_data"),
    "bool": (caffe2_pb2.TensorProto.BOOL, "int32_data"),
}


def NumpyArrayToCaffe2Tensor(arr: np.ndarray, name: str | None = None) -> caffe2_pb2.TensorProto:
    """Return the TensorProto of an array.

    Raises:
        RuntimeError: tensors have no such data type.
    """
    tensor = caffe2_pb2.TensorProto(dims=arr.shape)
    if name:
        tensor.name = name
    if arr.dtype == np.float32:
        tensor.data_type = caffe2_pb2.TensorProto.FLOAT
        # as wire bytes: number by number takes 10 times as long, and as much memory
        tensor.MergeFromString(packed(_FLOAT_DATA_TAG, np.ascontiguousarray(arr, "<f4")))
    elif arr.dtype.kind in "SUO":
        tensor.data_type = caffe2_pb2.TensorProto.STRING
        tensor.string_data.extend(as_bytes(text) for text in arr.reshape(-1).tolist())
    elif arr.dtype.name in _FIELDS:
        number, field = _FIELDS[arr.dtype.name]
        tensor.data_type = number  # type: ignore[assignment]
        getattr(tensor, field).extend(arr.reshape(-1).tolist())
    else:
        raise RuntimeError(f"Numpy data type not supported yet: {arr.dtype}")
    return tensor


def TryReadProtoWithClass(cls: type[Message], s: str | bytes) -> Message:
    """Read a message from text or bytes; text is tried first.

    Raises:
        google.protobuf.message.DecodeError: it is neither.
    """
    message = cls()
    try:
        text_format.Parse(decoded(s) if isinstance(s, bytes) else s, message)
        return message
    except (text_format.ParseError, UnicodeError):
        message = cls()
        message.ParseFromString(as_bytes(s))
        return message


def GetContentFromProto(
    obj: Message, function_map: dict[type[Message], Callable[[Any], Any]]
) -> Any:
    """Return what the function for the message's class gives."""
    return next((function(obj) for cls, function in function_map.items() if type(obj) is cls), None)


def GetContentFromProtoString(
    s: str | bytes, function_map: dict[type[Message], Callable[[Any], Any]]
) -> Any:
    """Read a message as the first class that fits, and return what its function gives.

    Raises:
        google.protobuf.message.DecodeError: no class fits.
    """
    for cls, function in function_map.items():
        try:
            return function(TryReadProtoWithClass(cls, s))
        except Exception:  # noqa: BLE001 (the next class may fit)
            continue
    raise DecodeErrorOfAll("The text is not a message of any of these classes")


class DecodeErrorOfAll(DecodeError):
    """The text fits none of the classes."""


def ConvertProtoToBinary(proto_class: type[Message], filename: str, out_filename: str) -> None:
    """Write a text file of a message as a binary file."""
    with open(filename, "rb") as source:
        proto = TryReadProtoWithClass(proto_class, source.read())
    with open(out_filename, "wb") as target:
        target.write(proto.SerializeToString())


def EnumClassKeyVals(cls: type) -> dict[str, Any]:
    """Return the public constants of a class by name."""
    return {
        name: value
        for name, value in ((name, getattr(cls, name)) for name in dir(cls))
        if not name.startswith("_") and not callable(value)
    }


def ResetBlobs(blobs: Iterable[Any]) -> None:
    for blob in blobs:
        workspace.ResetBlob(str(blob))


def raiseIfNotEqual(a: Any, b: Any, msg: str) -> None:
    if a != b:
        raise Exception(f"{msg}. {a} != {b}")


def NHWC2NCHW(tensor: np.ndarray) -> np.ndarray:
    """Return a view of an array (batch, ..., channels) as (batch, channels, ...)."""
    return np.moveaxis(tensor, -1, 1)


def NCHW2NHWC(tensor: np.ndarray) -> np.ndarray:
    """Return a view of an array (batch, channels, ...) as (batch, ..., channels)."""
    return np.moveaxis(tensor, 1, -1)


class DebugMode:
    """Runs a function; an error opens Python's debugger where there is a terminal."""

    @classmethod
    def run(cls, func: Callable[[], Any]) -> Any:
        try:
            return func()
        except Exception:
            if not sys.stdin.isatty():
                raise
            traceback.print_exc()
            print('Entering interactive debugger. Type "bt" to print the full stacktrace.')
            pdb.post_mortem()
            raise


def debug(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in `DebugMode`."""

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return DebugMode.run(lambda: f(*args, **kwargs))

    return wrapper
