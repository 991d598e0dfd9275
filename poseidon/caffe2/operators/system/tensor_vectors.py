"""Vectors of tensors: collected over runs, counted, joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import Context, operator


@operator("CreateTensorVector")
def create_tensor_vector() -> list[Any]:
    """Return an empty vector."""
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
    if not vector:
        raise ValueError("the vector has no tensors to join")
    return torch.cat(vector)


@operator("CollectTensor", inputs=(2, 1 << 30))
class CollectTensor:
    """Collects a tensor for each vector, by reservoir sampling: each run so far is kept with the same probability.

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
            raise ValueError(f"{len(inputs)} inputs are given: as many tensors as vectors are expected")
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
