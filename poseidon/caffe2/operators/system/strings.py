"""Operators on texts: strings, and lines of text files."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import strings_of


def _texts(x: Any) -> list[bytes]:
    """Return the strings of a tensor.

    Raises:
        ValueError: it has numbers.
    """
    if not isinstance(x, np.ndarray):
        raise ValueError("the input is a tensor of numbers, expected strings")
    return list(x.reshape(-1).tolist())


def _strings(x: Any, change: Callable[[bytes], bytes]) -> Any:
    texts = _texts(x)
    made = strings_of(list(map(change, texts)))
    return made.reshape(x.shape)


def _booleans(x: Any, test: Callable[[bytes], bool]) -> Tensor:
    return torch.tensor(list(map(test, _texts(x))), dtype=torch.bool).reshape(x.shape)


@operator("StringPrefix")
def string_prefix(x: Any, *, length: int = 3) -> Any:
    """Return the first bytes of each string."""
    return _strings(x, lambda text: text[:length])


@operator("StringSuffix")
def string_suffix(x: Any, *, length: int = 3) -> Any:
    """Return the last bytes of each string."""
    return _strings(x, lambda text: text[-length:] if length else b"")


@operator("StringStartsWith")
def string_starts_with(x: Any, *, prefix: bytes = b"") -> Tensor:
    return _booleans(x, lambda text: text.startswith(prefix))


@operator("StringEndsWith")
def string_ends_with(x: Any, *, suffix: bytes = b"") -> Tensor:
    return _booleans(x, lambda text: text.endswith(suffix))


@operator("StringEquals")
def string_equals(x: Any, *, text: bytes = b"") -> Tensor:
    return _booleans(x, lambda each: each == text)


@operator("StringJoin", expected="N *")
def string_join(x: Any, *, delimiter: str = ",", axis: int = 0) -> Any:
    """Return a string for each row (axis 0) or column (axis 1): each value with a delimiter."""
    values = x if isinstance(x, np.ndarray) else x.cpu().numpy()
    rows = values.reshape(len(values), -1)
    made = [
        "".join(
            (item.decode() if isinstance(item, bytes) else f"{item:g}") + delimiter for item in row
        )
        for row in (rows if axis == 0 else rows.T).tolist()
    ]
    return strings_of([text.encode() for text in made])


@operator("Print")
class Print:
    """Prints a tensor's first values in the first of `every_n` runs; `to_file` adds them to
    `<name>.log` in the root folder.
    """

    def __init__(
        self, *, context: Context, to_file: bool = False, limit: int = 1000, every_n: int = 1
    ) -> None:
        self.context, self.to_file, self.limit = context, to_file, limit
        self.runs = cycle(range(every_n))

    def __call__(self, x: Any) -> None:
        if next(self.runs) > 0:
            return
        name = self.context.definition.input[0]
        values = ",".join(_text(value) for value in x.reshape(-1)[: self.limit].tolist())
        if self.to_file:
            path = f"{self.context.workspace.root_folder}/{name.replace('/', '_')}.log"
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{values}\n")
            return
        shape = ",".join(str(size) for size in x.shape)
        sys.stderr.write(f"Tensor {name} ({shape}): {values}\n")


def _text(value: Any) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


@operator("WallClockTime")
def wall_clock_time() -> Tensor:
    """Return the time in nanoseconds, an int64 scalar."""
    return torch.tensor(time.time_ns())


@operator("Assert")
def assert_(condition: Tensor, *, error_msg: str = "") -> None:
    """Raise ValueError when a value of the condition is false."""
    if not bool(condition.bool().all()):
        raise ValueError(error_msg or "an assertion does not hold")


@operator("Conditional", gradient=NO_GRADIENT)
def conditional(condition: Tensor, x: Any, y: Any) -> Any:
    """Return the rows of x where the condition holds, else the rows of y."""
    if isinstance(x, np.ndarray):
        return np.where(condition.numpy().reshape((-1,) + (1,) * (x.ndim - 1)), x, y)
    return torch.where(condition.reshape((-1,) + (1,) * (x.dim() - 1)), x, y)


class TextFileReader:
    """A place in a text file, which several threads may read."""

    def __init__(self, path: str, passes: int, types: list[int]) -> None:
        """Open a file.

        Args:
            path: the file.
            passes: how often it is read from its beginning to its end.
            types: the data type of each field, FLOAT or STRING.

        Raises:
            ValueError: a field has a different type, or there is none.
            RuntimeError: the file cannot be opened.
        """
        if not types or not set(types) <= {TensorProto.FLOAT, TensorProto.STRING}:
            raise ValueError("field_types must be data types of the fields, each FLOAT or STRING")
        self.types, self.path = types, path
        self.lock = threading.Lock()
        try:
            self._file: TextIO = open(  # noqa: SIM115
                path, encoding="utf-8", errors="surrogateescape", newline="\n"
            )
        except OSError as error:
            raise EnforceNotMet(f"Cannot open the text file {path}: {error.strerror}") from error
        self._rows = self._all(passes)

    def _all(self, passes: int) -> Iterator[list[str]]:
        with self._file as file:
            for _ in range(passes):
                file.seek(0)
                for number, line in enumerate(file, 1):
                    row = line.removesuffix("\n").split("\t")
                    if len(row) != len(self.types):
                        raise EnforceNotMet(
                            f"The line {number} of {self.path} has {len(row)} fields, "
                            f"{len(self.types)} are expected"
                        )
                    yield row

    def read(self, count: int) -> list[Any]:
        """Return the next rows, a tensor for each field; empty ones at the end of the last pass."""
        with self.lock:
            rows = list(islice(self._rows, count))
        return [self._column(kind, [row[i] for row in rows]) for i, kind in enumerate(self.types)]

    def _column(self, kind: int, texts: list[str]) -> Any:
        if kind == TensorProto.STRING:
            return strings_of([text.encode(errors="surrogateescape") for text in texts])
        try:
            return torch.tensor([float(text) for text in texts], dtype=torch.float32)
        except ValueError as error:
            raise EnforceNotMet(f"{self.path} has a field that is not a number: {error}") from error


@operator("CreateTextFileReader", gradient=NO_GRADIENT)
def create_text_file_reader(
    *, context: Context, filename: str, num_passes: int = 1, field_types: list[int]
) -> Any:
    """Return a reader of a text file; see `TextFileReader`."""
    return (
        None if context.device.type == "meta" else TextFileReader(filename, num_passes, field_types)
    )


@operator("TextFileReaderRead", gradient=NO_GRADIENT)
def text_file_reader_read(reader: Any, *, context: Context, batch_size: int = 1) -> list[Any]:
    """Return the next rows of a reader, a tensor for each field; empty ones at the end.

    Raises:
        RuntimeError: the input is not a reader, or its fields are not as many as the outputs.
    """
    if not isinstance(reader, TextFileReader):
        raise EnforceNotMet("The input is not a text file reader; CreateTextFileReader makes one")
    if context.outputs != len(reader.types):
        raise EnforceNotMet(
            f"The file has {len(reader.types)} fields, the operator {context.outputs} outputs"
        )
    return reader.read(batch_size)
