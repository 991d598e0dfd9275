"""Save and Load of blobs, readers of databases, and batches of TensorProtos from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from poseidon.caffe.data.datum import is_datum
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto, SerializationOptions, TensorProtos
from poseidon.caffe2.runtime import databases
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.reader import Consumer, Reader, Record
from poseidon.caffe2.runtime.values import (
    CHUNK_SIZE,
    Blob,
    deserialize,
    from_proto,
    serialize,
    strings_of,
)

CHUNK = "#%"
"""What stands between the name of a blob and the number of a chunk in a key."""


CHUNK_OF = {-1: 0, 0: -1}
"""Chunk sizes of `serialize` (0 for Caffe2's own, -1 for all) by chunk sizes of `Save`."""
ELEMENT_SIZES = {torch.uint16: 3, torch.int16: 3, torch.float16: 3, torch.int32: 5}
"""Bytes of a value in a message, where it takes a different number in memory."""
OVERHEAD = 50
"""Bytes of a message beside its name and its values, and of a string, as Caffe2 estimates them."""


def chunk_size(options: SerializationOptions, name: str, default: int) -> int:
    """Return the chunk size of the first pattern that matches a blob's whole name."""
    for option in options.options:
        if re.fullmatch(option.blob_name_regex, name):
            return option.chunk_size if option.HasField("chunk_size") else default
    return default


@operator("EstimateAllBlobSizes")
def estimate_all_blob_sizes(
    *, context: Context, include_shared: bool = True, options: bytes = b""
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the names of the workspace's blobs, and about how many bytes each is saved in, int64.

    The outputs are blobs too.
    """
    given = SerializationOptions.FromString(options)
    names = sorted({*context.workspace.blobs, *context.definition.output})
    sizes = []
    for name in names:
        value = context.workspace.create(name).value
        if name in context.definition.output:
            count, each = len(names), OVERHEAD if name == context.definition.output[0] else 8
        elif isinstance(value, torch.Tensor):
            count, each = value.numel(), ELEMENT_SIZES.get(value.dtype, value.element_size())
        else:
            count, each = (value.size if isinstance(value, np.ndarray) else 1), OVERHEAD
        values = chunk_size(given, name, -1)
        values = CHUNK_SIZE if values == -1 else values or max(count, 1)
        sizes.append(max(-(-count // values), 1) * (len(name) + OVERHEAD) + count * each)
    texts = strings_of([name.encode() for name in names])
    return texts, torch.tensor(sizes, dtype=torch.int64)


def _path(context: Context, db: str, absolute: bool) -> str:
    return db if absolute else os.path.join(context.workspace.root_folder, db)


class _Saving:
    """Save: writes blobs to a database."""

    def __init__(
        self,
        *,
        context: Context,
        db: str,
        db_type: str,
        absolute_path: bool = False,
        strip_prefix: str = "",
        blob_name_overrides: list[str] = [],  # noqa: B006 (it is not changed)
        chunk_size: int = -1,
        options: bytes = b"",
    ) -> None:
        names = list(context.definition.input)
        if blob_name_overrides and len(blob_name_overrides) != len(names):
            raise ValueError(f"{len(blob_name_overrides)} names are given for {len(names)} blobs")
        if blob_name_overrides and strip_prefix:
            raise ValueError("strip_prefix and blob_name_overrides exclude each other")
        self.names = blob_name_overrides or [_stripped(name, strip_prefix) for name in names]
        for name in self.names:
            if self.names.count(name) > 1:
                raise ValueError(f"Duplicated blob name: {name}")
        self.path, self.db_type = _path(context, db, absolute_path), db_type
        self.chunk_size = chunk_size
        self.options = SerializationOptions.FromString(options)

    def _chunk_of(self, name: str) -> int:
        """Return the values in a message of a blob, as `serialize` wants them."""
        return CHUNK_OF.get(size := chunk_size(self.options, name, self.chunk_size), size)

    def _records(self, blobs: Sequence[Blob]) -> Iterator[tuple[bytes, bytes]]:
        for name, blob in zip(self.names, blobs, strict=True):
            if blob.value is None:
                raise EnforceNotMet(f"The blob {name} is empty and cannot be saved")
            for number, message in enumerate(serialize(name, blob.value, self._chunk_of(name))):
                key = name if message.type != "Tensor" else f"{name}{CHUNK}{number}"
                yield key.encode(), message.SerializeToString()

    def write(self, path: str, blobs: Sequence[Blob]) -> None:
        databases.write_records(path, self.db_type, self._records(blobs))


@operator("Save", "Snapshot", blobs=True, inputs=(1, ANY), outputs=(0, 0))
class Save(_Saving):
    """Writes its inputs to a database.

    Args of the operator:
        db, db_type: the database; its path begins at the workspace's root folder, unless
        `absolute_path` is set. strip_prefix: what is cut off from the names. blob_name_overrides:
        other names. chunk_size: values in a record; -1 for Caffe2's own number, 0 for all. options:
        a SerializationOptions message: other chunk sizes for some blobs.
    """

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        self.write(self.path, inputs)


@operator("Checkpoint", blobs=True, inputs=(1, ANY), outputs=(0, 0))
class Checkpoint:
    """Saves its inputs whenever the first, an iteration counter, is a multiple of `every`.

    `db` is a pattern: %d is the iteration. The other arguments are as for `Save`.
    """

    def __init__(
        self,
        *,
        context: Context,
        db: str,
        db_type: str,
        every: int = 1,
        absolute_path: bool = False,
    ) -> None:
        self.saving = _Saving(context=context, db=db, db_type=db_type, absolute_path=absolute_path)
        self.every = every

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        iteration = int(inputs[0].value)
        if iteration % self.every == 0:
            pattern = self.saving.path
            self.saving.write(pattern % iteration if "%" in pattern else pattern, inputs)


def _stripped(name: str, prefix: str) -> str:
    """Return a name without all that comes before and with a prefix."""
    place = name.find(prefix) if prefix else -1
    return name if place < 0 else name[place + len(prefix) :]


@operator("Load", gradient=NO_GRADIENT, blobs=True)
class Load:
    """Reads blobs from databases, or from the reader that is its input.

    Args of the operator:
        db or dbs, db_type, absolute_path: where to read; see `Save`. add_prefix, strip_prefix: what
        is added to, and cut off from, the names of the database. source_blob_names: the names in
        the database of the outputs. load_all: whether all blobs are read, under their names; the
        operator then may have no outputs. allow_incomplete: whether outputs may be missing in the
        database. keep_device: whether a tensor of a GPU is put there again; else all go to the
        operator's device.
    """

    def __init__(
        self,
        *,
        context: Context,
        db: str = "",
        dbs: list[str] = [],  # noqa: B006
        db_type: str = "",
        absolute_path: bool = False,
        add_prefix: str = "",
        strip_prefix: str = "",
        source_blob_names: list[str] = [],  # noqa: B006
        load_all: bool = False,
        allow_incomplete: bool = False,
        keep_device: bool = False,
    ) -> None:
        outputs = list(context.definition.output)
        if db and dbs:
            raise ValueError("db and dbs exclude each other")
        if load_all and outputs and source_blob_names:
            raise ValueError("load_all and source_blob_names exclude each other")
        if source_blob_names and len(source_blob_names) != len(outputs):
            raise ValueError(f"{len(source_blob_names)} names are given for {len(outputs)} blobs")
        for name in outputs:
            if outputs.count(name) > 1:
                raise ValueError(f"Duplicated output name: {name}")
        self.context, self.db_type = context, db_type
        self.paths = [_path(context, name, absolute_path) for name in dbs or ([db] if db else [])]
        self.add_prefix, self.strip_prefix = add_prefix, strip_prefix
        self.wanted = dict(zip(source_blob_names or outputs, outputs, strict=True))
        self.load_all, self.allow_incomplete = load_all, allow_incomplete
        self.keep_device = keep_device

    def _target(self, key: str) -> str | None:
        """Return the blob that a database key is loaded into, None for an unwanted one."""
        name = self.add_prefix + _stripped(key.partition(CHUNK)[0], self.strip_prefix)
        if self.load_all:
            return name
        return self.wanted.get(name)

    def _sources(self, inputs: Sequence[Blob]) -> Iterator[Iterator[tuple[bytes, bytes]]]:
        if inputs:
            reader: Reader = inputs[0].value
            yield databases.records(reader.path, reader.db_type)
        for path in self.paths:
            yield databases.records(path, self.db_type)

    def __call__(self, inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
        found: dict[str, Any] = {}
        sources: dict[str, int] = {}
        for number, records in enumerate(self._sources(inputs)):
            for key, content in records:
                name = self._target(key.decode())
                if name is None:
                    continue
                if sources.setdefault(name, number) != number:
                    raise EnforceNotMet(f"The blob {name} is in more than one database")
                message = _message(BlobProto, content, key)
                found[name] = self._placed(deserialize(message, found.get(name)), message)
        missing = [name for name in self.wanted.values() if name not in found]
        if missing and not self.allow_incomplete:
            raise EnforceNotMet(f"The database has no blob {', '.join(missing)}")
        for name, value in found.items():
            self.context.workspace.create(name).value = value

    def _placed(self, value: Any, message: BlobProto) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        device = self.context.device
        if self.keep_device:
            detail = message.tensor.device_detail
            device = (
                torch.device("cuda", detail.device_id)
                if detail.device_type == 1
                else torch.device("cpu")
            )
        return value.to(device)


def _message(kind: Any, content: bytes, key: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise EnforceNotMet(f"The record {key!r} is not a {kind.__name__}") from error


@operator("DBExists")
def db_exists(
    *, context: Context, db_name: str, db_type: str, absolute_path: bool = False
) -> torch.Tensor:
    """Return whether there is a database, a scalar."""
    return torch.tensor(databases.exists(_path(context, db_name, absolute_path), db_type))


@operator("CreateDB", gradient=NO_GRADIENT)
def create_db(
    *,
    context: Context,
    db: str,
    db_type: str = "leveldb",
    num_shards: int = 1,
    shard_id: int = 0,
    shard_sizes: list[int] = [],  # noqa: B006 (it is not changed)
    skip: int = 0,
) -> Any:
    """Return a reader of a database, or of one shard of it.

    Args:
        context: its seed, else torch's generator, gives the random numbers of reads.
        db, db_type: the database.
        num_shards, shard_id: the shard.
        shard_sizes: each shard's records in a global batch, if these differ (not in Caffe2).
        skip: the records of the shard that an earlier run has read (not in Caffe2).
    """
    if context.device.type == "meta":
        return None  # shapes need no database
    seed = int(torch.randint(1 << 62, (), generator=context.generator))
    reader = Reader(db, db_type, num_shards, shard_id, shard_sizes=shard_sizes, seed=seed)
    if skip:
        reader.skip(skip)
    return reader


@operator("TensorProtosDBInput", gradient=NO_GRADIENT, inputs=(1, 1), outputs=(1, ANY))
class TensorProtosDBInput:
    """The next records of a reader, each a TensorProtos: one output for each of its tensors.

    `batch_size` is the number of records, the outputs' first dimension; 0 is one record without.
    """

    def __init__(self, *, context: Context, batch_size: int = 0) -> None:
        self.context, self.batch_size = context, batch_size
        blob = context.workspace.find(context.definition.input[0]) if context.workspace else None
        self._consumer = Consumer(max(batch_size, 1), blob.value if blob else None)

    def __call__(self, reader: Any) -> tuple[Any, ...]:
        """Return the outputs.

        Raises:
            RuntimeError: a record differs from the rest in format, number of tensors, or shapes.
        """
        rows = [self._row(reader, record) for record in self._consumer.take(reader)]
        if self.batch_size == 0:
            return tuple(_on(value, self.context) for value in rows[0])
        for column in zip(*rows, strict=True):
            shapes = sorted({tuple(value.shape) for value in column})
            if len(shapes) > 1:
                raise EnforceNotMet(
                    f"the records of a batch of {reader.path} ({reader.db_type}) have tensors of "
                    f"the shapes {shapes[0]} and {shapes[1]}: expected one shape, or batch_size=0"
                )
        return tuple(_on(_stacked(list(each)), self.context) for each in zip(*rows, strict=True))

    def _row(self, reader: Reader, record: Record) -> list[Any]:
        name = f"the record {record.key.decode(errors='backslashreplace')!r} of {reader.path} ({reader.db_type})"
        expected = f"expected a TensorProtos of {self.context.outputs}"
        try:
            tensors = TensorProtos.FromString(record.value).protos
            values = [from_proto(tensor) for tensor in tensors]
        except (DecodeError, ValueError, RuntimeError) as error:
            raise EnforceNotMet(
                f"{name} is not a TensorProtos ({error}); {expected} tensors"
            ) from error
        if len(tensors) != self.context.outputs:
            hint = (
                "; it is a Caffe Datum, which ImageInput reads"
                if not tensors and is_datum(record.value)
                else ""
            )
            raise EnforceNotMet(f"{name} has {len(tensors)} tensors, {expected} tensors{hint}")
        return values


def _stacked(values: list[Any]) -> Any:
    return np.stack(values) if isinstance(values[0], np.ndarray) else torch.stack(values)


def _on(value: Any, context: Context) -> Any:
    return value.to(context.device) if isinstance(value, torch.Tensor) else value
