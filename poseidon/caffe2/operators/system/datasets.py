"""Data sets in memory: columns of records, read by a cursor; and vectors of tensors.

Columns are named as in `schema`: `a:lengths` has the number of values that each record has in the
columns `a:...`, which may again have lengths. Columns with the same lengths are a domain; the
records themselves are the first domain.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import ANY, Context, operator
from poseidon.caffe2.proto.caffe2_pb2 import BlobProto
from poseidon.caffe2.runtime.errors import EnforceNotMet
from poseidon.caffe2.runtime.values import READERS, Blob, deserialize, joined, serialize

CURSOR = "std::unique_ptr<TreeCursor>"
"""The type of a cursor in a file."""


class TreeCursor:
    """A place in a data set: the next row of each domain. It is `Serializable`.

    Attributes:
        fields: the names of the columns.
        domains: the domain of each column; domain 0 is the records'.
        lengths: the column of lengths of each domain but the first.
        offsets: the next row of each domain.
        lock: to be held while the cursor moves.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = list(fields)
        parts = [name.split(":") for name in fields]
        self.lengths = [column for column, part in enumerate(parts) if part[-1] == "lengths"]
        self.domains = [self._domain(column, parts) for column in range(len(parts))]
        self.offsets = [0] * (len(self.lengths) + 1)
        self.lock = threading.Lock()

    def _domain(self, column: int, parts: Sequence[Sequence[str]]) -> int:
        """Return the domain of the lengths that have the longest prefix in common with a column."""
        prefixes = {
            domain: parts[other][:-1]
            for domain, other in enumerate(self.lengths, 1)
            if other != column and parts[column][: len(parts[other]) - 1] == parts[other][:-1]
        }
        return max(prefixes, key=lambda domain: len(prefixes[domain]), default=0)

    def blob_type(self) -> str:
        return CURSOR

    def fill_message(self, message: BlobProto) -> None:
        (offsets,) = serialize(message.name, torch.tensor(self.offsets), -1)
        message.tensor.CopyFrom(offsets.tensor)
        message.content = "".join(f"{name} " for name in self.fields).encode()

    def sizes(self, columns: Sequence[Any]) -> list[int]:
        """Return the number of rows of each domain.

        Raises:
            RuntimeError: a domain's columns differ in their rows, or from the lengths' sum.
        """
        if len(columns) != len(self.fields):
            raise EnforceNotMet(
                f"{len(columns)} columns are given, the data set has {len(self.fields)}"
            )
        sizes: dict[int, int] = {}
        for name, domain, column in zip(self.fields, self.domains, columns, strict=True):
            if sizes.setdefault(domain, len(column)) != len(column):
                raise EnforceNotMet(
                    f"The column {name} has {len(column)} rows, others of its domain have "
                    f"{sizes[domain]}"
                )
        for domain, column in enumerate(self.lengths, 1):
            total = int(columns[column].sum())
            if sizes.setdefault(domain, total) != total:
                raise EnforceNotMet(
                    f"The lengths {self.fields[column]} sum up to {total}, their columns have "
                    f"{sizes[domain]} rows"
                )
        return [sizes.get(domain, 0) for domain in range(len(self.offsets))]

    def taken(self, columns: Sequence[Any], offsets: Sequence[int], records: int) -> list[int]:
        """Return the rows of each domain that so many records from given offsets have."""
        rows = [records]
        for column in self.lengths:
            parent = self.domains[column]
            begin = offsets[parent]
            rows.append(int(columns[column][begin : begin + rows[parent]].sum()))
        return rows

    def read(self, columns: Sequence[Any], records: int, whole: bool) -> list[Any]:
        """Return the next records, and move behind them; `whole` gives none if there are fewer."""
        sizes = self.sizes(columns)
        with self.lock:
            left = max(sizes[0] - self.offsets[0], 0)
            count = 0 if whole and left < records else min(left, records)
            rows, begin = self.taken(columns, self.offsets, count), self.offsets
            self.offsets = [offset + row for offset, row in zip(begin, rows, strict=True)]
        return [
            _copy(column[begin[domain] : begin[domain] + rows[domain]])
            for domain, column in zip(self.domains, columns, strict=True)
        ]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value.copy()


def _read(message: BlobProto) -> TreeCursor:
    cursor = TreeCursor(message.content.decode().split())
    stored = BlobProto(name=message.name, type="Tensor")
    stored.tensor.CopyFrom(message.tensor)
    cursor.offsets = deserialize(stored).tolist()
    return cursor


READERS[CURSOR] = _read


@operator("CreateTreeCursor")
def create_tree_cursor(*, fields: list[str]) -> Any:
    """Return a cursor at the beginning of a data set with these columns."""
    return TreeCursor(fields)


@operator("ResetCursor")
def reset_cursor(cursor: Any) -> None:
    """Move a cursor to the beginning."""
    with cursor.lock:
        cursor.offsets = [0] * len(cursor.offsets)


@operator("GetCursorOffset")
def get_cursor_offset(cursor: Any) -> Tensor:
    """Return the next row of each domain, int32."""
    return torch.tensor(cursor.offsets, dtype=torch.int32)


@operator("ReadNextBatch")
def read_next_batch(
    cursor: Any, *columns: Any, batch_size: int = 1, enforce_batch_size: bool = False
) -> list[Any]:
    """Return the next records, a tensor for each column; empty ones at the end."""
    return cursor.read(columns, batch_size, enforce_batch_size)  # type: ignore[no-any-return]


@operator("ComputeOffset")
def compute_offset(cursor: Any, *columns: Any) -> Tensor:
    """Return the row where each record begins, by domain, and a last line with the ends."""
    sizes = cursor.sizes(columns)
    begins = [torch.arange(sizes[0] + 1)]
    for column in cursor.lengths:
        zero = torch.zeros(1, dtype=torch.int64)
        ends = torch.cat([zero, columns[column].to(torch.int64).cumsum(0)])
        begins.append(ends[begins[cursor.domains[column]]])
    return torch.stack(begins, 1)


@operator("SortAndShuffle")
def sort_and_shuffle(
    cursor: Any,
    *columns: Any,
    sort_by_field_idx: int = 1,
    batch_size: int = 1,
    shuffle_size: int = 1,
) -> Tensor:
    """Return an order of the records.

    They are sorted by a column (not where its index is -1), shuffled among `shuffle_size` batches
    each, and then whole batches are shuffled; a rest smaller than a batch stays last.
    """
    count = cursor.sizes(columns)[0]
    order = torch.arange(count)
    if sort_by_field_idx != -1:
        order = torch.argsort(columns[sort_by_field_idx], stable=True)
    window = batch_size * shuffle_size
    if window > 1:
        order = torch.cat([part[torch.randperm(len(part))] for part in order.split(window)])
    whole = count // batch_size * batch_size
    batches = order[:whole].reshape(-1, batch_size)
    return torch.cat([batches[torch.randperm(len(batches))].reshape(-1), order[whole:]])


@operator("ReadRandomBatch")
def read_random_batch(
    cursor: Any,
    order: Tensor,
    offsets: Tensor,
    *columns: Any,
    batch_size: int = 1,
    enforce_batch_size: bool = False,
    loop_over: bool = False,
) -> list[Any]:
    """Return the next records in the order of `SortAndShuffle`, by rows of `ComputeOffset`.

    With `loop_over` the order begins again where it ends.
    """
    with cursor.lock:
        begin = cursor.offsets[0]
        over = begin + batch_size > len(order) if enforce_batch_size else begin >= len(order)
        if loop_over and over:
            begin, over = 0, enforce_batch_size and batch_size > len(order)
        if not over:
            cursor.offsets[0] = begin + batch_size
    records = [] if over else order[begin : begin + batch_size].tolist()
    return [
        joined([column[:0], *_rows(column, offsets[:, domain], records)])
        for column, domain in zip(columns, cursor.domains, strict=True)
    ]


def _rows(column: Any, begins: Tensor, records: Sequence[int]) -> Iterator[Any]:
    for record in records:
        yield column[int(begins[record]) : int(begins[record + 1])]


@operator("CheckDatasetConsistency")
def check_dataset_consistency(*columns: Any, fields: list[str]) -> None:
    """Raise RuntimeError where the columns of a data set do not fit each other."""
    TreeCursor(fields).sizes(columns)


@operator("Append")
def append(dataset: Any, new: Any) -> Any:
    """Return a column with more rows; an empty one takes the type of the new rows."""
    return joined([dataset, new]) if len(dataset) else _copy(new)


@operator("AtomicAppend", blobs=True, inputs=(3, ANY), outputs=(1, ANY))
def atomic_append(inputs: Sequence[Blob], outputs: Sequence[Blob]) -> None:
    """Append rows to columns in one step: inputs are a mutex, the columns, and their rows."""
    if len(inputs) != 2 * len(outputs) + 1:
        raise EnforceNotMet(
            f"AtomicAppend: {len(outputs)} columns need {2 * len(outputs) + 1} inputs"
        )
    with inputs[0].value:
        for blob, new in zip(outputs, inputs[1 + len(outputs) :], strict=True):
            blob.value = append(blob.value, new.value)


@operator("TrimDataset")
def trim_dataset(*columns: Any, fields: list[str], multiple_of: int) -> list[Any]:
    """Return the columns without the last records: those left are a multiple in number."""
    cursor = TreeCursor(fields)
    return cursor.read(columns, cursor.sizes(columns)[0] // multiple_of * multiple_of, False)


@operator("CreateTensorVector")
def create_tensor_vector() -> list[Any]:
    return [[]]


@operator("TensorVectorSize")
def tensor_vector_size(vector: list[Tensor]) -> Tensor:
    """Return the number of tensors, an int32 scalar."""
    return torch.tensor(len(vector), dtype=torch.int32)


@operator("ConcatTensorVector")
def concat_tensor_vector(vector: list[Tensor]) -> Tensor:
    """Return the tensors of a vector joined along their first dimension.

    Raises:
        ValueError: the vector is empty.
    """
    if not isinstance(vector, list):
        raise ValueError("the input is not a vector of tensors: CreateTensorVector makes one")
    if not vector:
        raise ValueError("the vector has no tensors to join")
    return torch.cat(vector)


@operator("CollectTensor", inputs=(2, ANY))
class CollectTensor:
    """Collects a tensor for each vector by reservoir sampling, all runs equally likely.

    Args of the operator:
        num_to_collect: how many runs are kept; -1 for all.
    """

    def __init__(self, *, context: Context, num_to_collect: int = -1) -> None:
        self.most = num_to_collect
        self.generator = context.generator
        self.visited = 0

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the vectors; the inputs are these, then the tensor of each.

        Raises:
            ValueError: there is not one tensor for each vector.
        """
        count = len(inputs) // 2
        if len(inputs) != 2 * count:
            raise ValueError(f"{len(inputs)} inputs: expected as many tensors as vectors")
        vectors = [[] if vector is None else vector for vector in inputs[:count]]
        place = self._place()
        for vector, tensor in zip(vectors, inputs[count:], strict=True):
            if place == len(vector):
                vector.append(tensor.clone())
            elif place is not None:
                vector[place] = tensor.clone()
        return tuple(vectors)

    def _place(self) -> int | None:
        """Return where the tensors of this run go, None for nowhere."""
        self.visited += 1
        if self.most < 0 or self.visited <= self.most:
            return self.visited - 1
        place = int(torch.randint(self.visited, (), generator=self.generator))
        return place if place < self.most else None


@operator("PackRecords", expected="_ *, ...")
def pack_records(*columns: Any, fields: list[str], pack_to_single_shared_ptr: bool = False) -> Any:
    """Return records as a tensor with an element for each: the vector of its rows of all columns.

    Args:
        columns: the columns of a data set.
        fields: their names, as `CreateTreeCursor` has them.
        pack_to_single_shared_ptr: whether all records become one element.
    """
    cursor = TreeCursor(fields)
    records = cursor.sizes(columns)[0]
    sizes = [records] if pack_to_single_shared_ptr else [1] * records
    packed = np.empty(len(sizes), dtype=object)
    for number, size in enumerate(sizes):
        packed[number] = cursor.read(columns, size, False)
    return packed


@operator("UnPackRecords")
def unpack_records(packed: Any, *prototypes: Any, fields: list[str]) -> list[Any]:
    """Return the columns of records that `PackRecords` has packed.

    Args:
        packed: the records.
        prototypes: tensors with the columns' types and shapes, needed where there are no records.
        fields: the names of the columns.

    Raises:
        RuntimeError: there are neither records nor prototypes, or their numbers of columns differ.
    """
    for number, value in enumerate(prototypes):
        if not value.ndim:
            raise EnforceNotMet(f"UnPackRecords: the prototype {number} has no rows")
    parts = [*([[value[:0] for value in prototypes]] if prototypes else []), *packed]
    if not parts:
        raise EnforceNotMet("UnPackRecords: neither records nor prototypes give the types")
    if any(len(part) != len(fields) for part in parts):
        raise EnforceNotMet(f"UnPackRecords: records of {len(fields)} columns are expected")
    return [joined(column) for column in zip(*parts, strict=True)]
