"""Vectors of tensors: collected over runs, counted, joined; records packed into one tensor of
vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.operators.system.datasets import TreeCursor
from poseidon.caffe2.runtime.errors import EnforceNotMet


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


@operator("CollectTensor", inputs=(2, 1 << 30))
class CollectTensor:
    """Collects a tensor for each vector, by reservoir sampling: each run so far is kept with the
    same probability.

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
            raise ValueError(
                f"{len(inputs)} inputs are given: as many tensors as vectors are expected"
            )
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
        prototypes: tensors with the types and shapes of the columns, needed where there are no
            records.
        fields: the names of the columns.

    Raises:
        RuntimeError: there are neither records nor prototypes, or they have a different number of
            columns.
    """
    for number, value in enumerate(prototypes):
        if not value.ndim:
            raise EnforceNotMet(
                f"UnPackRecords: the prototype {number} has no dimensions, expected rows"
            )
    parts = [*([[value[:0] for value in prototypes]] if prototypes else []), *packed]
    if not parts:
        raise EnforceNotMet(
            "UnPackRecords: there are no records, and no prototypes give the types of the columns"
        )
    if any(len(part) != len(fields) for part in parts):
        raise EnforceNotMet(f"UnPackRecords: records of {len(fields)} columns are expected")
    return [_rejoined(column) for column in zip(*parts, strict=True)]


def _rejoined(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else np.concatenate(list(parts))
