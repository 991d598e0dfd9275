"""Reduction in memory that the workers of one host share.

The memory has no name: it is a file that exists only as an open descriptor, which the processes
pass over their connections, so nothing of it is left when they have ended, however they ended.

Layout, in float32: every tensor's value, then for every worker but the leader a place for each
part. Each tensor begins at a cache line. Law: a place has one writer at a time; the messages of the
workers say which.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from poseidon.exchange.local.group import HostTree

FLOAT_BYTES = 4
LINE_FLOATS = 16


class SharedTensors:
    """A `Reduction` in shared memory.

    Args:
        tensors: flat views of this worker's tensors.
        with_parts: whether a tensor has places for parts (those that travel as factors have none).
        local_rank: this worker's local rank; 0 is the leader.
        encoded: indices of the tensors whose parts are not added.
        file: the memory's descriptor, which this takes over; the leader makes one with `new_file`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        with_parts: Sequence[bool],
        local_rank: int,
        tree: HostTree,
        encoded: AbstractSet[int] = frozenset(),
        file: int,
    ) -> None:
        self._encoded = encoded
        self._tensors = tensors
        self._local_rank = local_rank
        self._tree = tree
        sizes = [tensor.numel() for tensor in tensors]
        part_sizes = [size if keeps else 0 for size, keeps in zip(sizes, with_parts, strict=True)]
        parts = [len(tree.parts(other)) for other in range(1, tree.workers)]
        floats = _padded(sizes) + sum(parts) * _padded(part_sizes)
        length = max(floats, 1) * FLOAT_BYTES
        try:
            if os.fstat(file).st_size < length:
                os.ftruncate(file, length)
            memory = torch.frombuffer(mmap.mmap(file, length), dtype=torch.float32)
        finally:
            os.close(file)
        self._values = _cut(memory, 0, sizes)
        places = iter(range(sum(parts)))
        self._parts = [
            [
                _cut(memory, _padded(sizes) + next(places) * _padded(part_sizes), part_sizes)
                for _ in range(count)
            ]
            for count in parts
        ]
        """By follower and number of the part, for each tensor."""

    def contribute(self, index: int, part: Tensor | None, number: int = 0) -> None:
        if self._local_rank:
            place = self._parts[self._local_rank - 1][number][index]
            if part is None:
                place.zero_()
            else:
                place.copy_(part)

    def due(self, index: int) -> Sequence[int]:
        """Return the tensor itself: any order is possible."""
        return [index]

    def sums(self, index: int, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add the parts in their tree, in the memory of the left halves."""
        others = [[part[index].to(own[0].device) for part in parts] for parts in self._parts]
        return self._tree.sums([own, *others], encoded=index in self._encoded)

    def publish(self, index: int) -> None:
        self._values[index].copy_(self._tensors[index])

    def published(self, index: int) -> None:
        """Do nothing: what is published is a copy."""

    def receive(self, index: int) -> None:
        self._tensors[index].copy_(self._values[index])

    def close(self) -> None:
        """Free the memory: it goes with the last of its views."""
        self._values, self._parts = [], []


def new_file() -> int:
    """Make an empty file without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("poseidon", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _padded(sizes: Sequence[int]) -> int:
    return sum(-(-size // LINE_FLOATS) * LINE_FLOATS for size in sizes)


def _cut(memory: Tensor, start: int, sizes: Sequence[int]) -> list[Tensor]:
    views = []
    for size in sizes:
        views.append(memory[start : start + size])
        start += _padded([size])
    return views
