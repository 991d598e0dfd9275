"""The layout of the tensors that are summed: one flat memory, cut into buckets of one size, and
each bucket into a slice for each worker. Pure.

Law: the layout follows from the sizes of the tensors and the number of workers alone, so it is the
same on every worker and in every run. Rank 0 has a slice of every bucket; where a bucket has fewer
elements than there are workers, the last workers have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

SLICE_BYTES = 4 * 2**20
"""A worker's slice of a bucket at most: large enough that the cost of a message does not count."""
LEAST_BYTES = 2**20
BUCKETS = 6
"""At least, where they are not smaller than `LEAST_BYTES`: one bucket is summed while the next ones
travel, and the first leaves while the gradients of others are computed.
"""
FLOAT_BYTES = 4


class Buckets:
    """The layout.

    Args:
        sizes: elements of each tensor, by index, in the order in which their gradients come.
        workers: P, the number of workers.
        bucket_bytes: of each bucket but the last; None: see `bytes_of_buckets`.

    Attributes:
        elements: of the flat memory.
        places: of each tensor in it.
        tensors: for each bucket the tensors that it has a part of.
        of: for each tensor the numbers of the buckets that it lies in.
        slices: for each bucket each worker's slice of the flat memory.
    """

    def __init__(
        self, sizes: Mapping[int, int], workers: int, bucket_bytes: int | None = None
    ) -> None:
        ends = list(accumulate(sizes.values()))
        self.elements = ends[-1] if ends else 0
        self.places = {
            index: slice(end - size, end)
            for (index, size), end in zip(sizes.items(), ends, strict=True)
        }
        if bucket_bytes is None:
            bucket_bytes = bytes_of_buckets(self.elements, workers)
        step = max(1, bucket_bytes // FLOAT_BYTES)
        bounds = [*range(0, self.elements, step), self.elements]
        self.of = {
            index: range(place.start // step, -(-place.stop // step))
            for index, place in self.places.items()
        }
        self.tensors: list[list[int]] = [[] for _ in bounds[1:]]
        for index, buckets in self.of.items():
            for bucket in buckets:
                self.tensors[bucket].append(index)
        self.slices = [_cut(start, stop, workers) for start, stop in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.slices)

    def owners(self, bucket: int) -> list[int]:
        """Return the workers that have a slice of a bucket."""
        return [rank for rank, own in enumerate(self.slices[bucket]) if own.stop > own.start]

    def shared(self, index: int, bucket: int) -> int:
        """Return how many elements of a bucket are a tensor's."""
        place, slices = self.places[index], self.slices[bucket]
        shared = min(place.stop, slices[-1].stop) - max(place.start, slices[0].start)
        return int(shared)


def bytes_of_buckets(elements: int, workers: int) -> int:
    """Return the bytes of each bucket but the last."""
    size = SLICE_BYTES * workers
    while size > LEAST_BYTES and elements * FLOAT_BYTES < BUCKETS * size:
        size //= 2
    return size


def _cut(start: int, stop: int, parts: int) -> list[slice]:
    """Cut a range into parts of equal size; the first have one element more where it does not
    divide.
    """
    size, more = divmod(stop - start, parts)
    bounds = [start + part * size + min(part, more) for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]
