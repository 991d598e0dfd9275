"""Readers of text files: rows are lines, fields are divided by tabs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any, TextIO

import torch

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import TensorProto
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import strings_of


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
        return [
            self._column(kind, [row[place] for row in rows])
            for place, kind in enumerate(self.types)
        ]

    def _column(self, kind: int, texts: list[str]) -> Any:
        if kind == TensorProto.STRING:
            return strings_of([text.encode(errors="surrogateescape") for text in texts])
        try:
            return torch.tensor([float(text) for text in texts], dtype=torch.float32)
        except ValueError as error:
            raise EnforceNotMet(
                f"The file {self.path} has a field that is not a number: {error}"
            ) from error


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
        RuntimeError: the input is not a reader, or its number of fields differs from the operator's
            number of outputs.
    """
    if not isinstance(reader, TextFileReader):
        raise EnforceNotMet("The input is not a text file reader; CreateTextFileReader makes one")
    if context.outputs != len(reader.types):
        raise EnforceNotMet(
            f"The file has {len(reader.types)} fields, the operator {context.outputs} outputs"
        )
    return reader.read(batch_size)
