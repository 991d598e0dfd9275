"""Gradients packed into a few buffers, so that a collective operation carries many small tensors at once.

Law: which tensor lies where follows from the tensors' sizes alone, so it is the same on every replica and in every
run; buckets leave in their order, whatever order the gradients come in; the buffers are allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poseidon.exchange.observe.traffic import Flights, Traffic

BUCKET_BYTES = 25 * 2**20
"""Large enough that a bucket's latency does not count; torch's DistributedDataParallel has the same."""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the network starts early in the backward pass (as there)."""
FLOAT_BYTES = 4

Launch = Callable[[Tensor, Callable[[], None]], "Flight"]
"""Starts the sum of a buffer over all replicas, and calls back when it is there; returns at once."""
Flight = Callable[[], None]
"""Returns once the sum lies in the buffer."""


def plan_buckets(
    sizes: Sequence[int], *, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[list[int]]:
    """Deal tensors into buckets, the last tensor first, because backward passes end with the first.

    Args:
        sizes: elements of each tensor.
        bucket_bytes: a bucket is closed once it holds this much.
        first_bytes: the same of the first bucket.

    Returns:
        Indices of the tensors of each bucket.
    """
    buckets: list[list[int]] = []
    held = 0
    for index in reversed(range(len(sizes))):
        if held == 0:
            buckets.append([])
        buckets[-1].append(index)
        held += sizes[index] * FLOAT_BYTES
        if held >= (first_bytes if len(buckets) == 1 else bucket_bytes):
            held = 0
    return buckets


class _Bucket:
    """One buffer: where its tensors lie, which are still missing, and the sum under way."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        self.indices = tuple(indices)
        self.buffer = torch.zeros(sum(sizes[i] for i in indices), device=device, dtype=torch.float32)
        self.views: dict[int, Tensor] = dict(
            zip(indices, self.buffer.split([sizes[i] for i in indices]), strict=True)
        )
        self.missing = set(indices)
        self.flight: Flight | None = None
        self.summed = False
        self.launches = 0


class Buckets:
    """All buckets of a job.

    Args:
        tensors: index and number of elements of each tensor.
        replicas: W, the number of replicas that sum.
        device: where the buffers lie.
        launch: starts a sum.
        bucket_bytes: see `plan_buckets`.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[int, int]],
        *,
        replicas: int,
        device: torch.device,
        launch: Launch,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._replicas = replicas
        self._launch = launch
        plan = plan_buckets(
            [size for _, size in tensors],
            bucket_bytes=bucket_bytes,
            first_bytes=min(bucket_bytes, FIRST_BUCKET_BYTES),
        )
        sizes = dict(tensors)
        indices = [[tensors[place][0] for place in bucket] for bucket in plan]
        self._buckets = [_Bucket(own, _by_index(sizes), device) for own in indices]
        self._of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._next = 0
        self._flights = Flights(max(sizes, default=-1) + 1)

    def start(self) -> None:
        """A new iteration: every tensor is missing."""
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)
        self._next = 0

    def place(self, index: int) -> Tensor:
        """Where to write a tensor's part, once its last mean has been used; call `filled` afterwards."""
        return self._of[index].views[index]

    def filled(self, index: int) -> None:
        """A tensor's part is written: its bucket leaves if it is whole and all earlier ones have left."""
        bucket = self._of[index]
        bucket.missing.discard(index)
        self._flights.depart(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            ready = self._buckets[self._next]
            ready.launches += 1
            ready.flight = self._launch(ready.buffer, self._landing(ready))
            ready.summed = False
            self._next += 1

    def fill_missing(self) -> None:
        """End of the iteration: tensors that did not come count as zero."""
        for bucket in self._buckets:
            for index in sorted(bucket.missing, reverse=True):
                bucket.views[index].zero_()
                self.filled(index)

    def traffic(self) -> dict[int, Traffic]:
        """Of each tensor; bytes are those of a ring, in which each replica sends 2 (W - 1) / W of a buffer."""
        found = {}
        for index, bucket in self._of.items():
            size = bucket.views[index].numel() * FLOAT_BYTES * bucket.launches
            moved = 2 * size * (self._replicas - 1) // self._replicas
            found[index] = Traffic(bytes_out=moved, bytes_in=moved, on_way_s=self._flights.total_s(index))
        return found

    def _landing(self, bucket: _Bucket) -> Callable[[], None]:
        def landed() -> None:
            for index in bucket.indices:
                self._flights.arrive(index)

        return landed

    def mean(self, index: int) -> Tensor:
        """The tensor's mean over all replicas; waits for its bucket."""
        bucket = self._of[index]
        if bucket.flight is not None:
            bucket.flight()
            bucket.flight = None
        if not bucket.summed:
            bucket.buffer.div_(self._replicas)
            bucket.summed = True
        return bucket.views[index]


def _by_index(sizes: dict[int, int]) -> Sequence[int]:
    found = [0] * (max(sizes) + 1)
    for index, size in sizes.items():
        found[index] = size
    return found
