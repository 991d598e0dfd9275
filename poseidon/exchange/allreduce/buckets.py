"""Gradients packed into a few buffers, so that a collective operation carries many small tensors
at once.

Law: the layout of the buckets follows from the sizes of the tensors alone, so it is the same on
every replica and in every run. Buckets leave in their order, whatever the order of the gradients.
The buffers are allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poseidon.exchange.observe.statistics import Traffic, TransitTimes

BUCKET_BYTES = 25 * 2**20
"""Large enough that the latency of a bucket does not count; torch's DistributedDataParallel uses
the same size.
"""
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the network starts early in the backward pass (as in
DistributedDataParallel).
"""
FLOAT_BYTES = 4

Launch = Callable[[Tensor, Callable[[], None]], "Waiter"]
"""Starts the sum of a buffer over all replicas, and calls back when it is complete; returns at
once.
"""
Waiter = Callable[[], None]
"""Waits until the sum is in the buffer."""


def plan_buckets(
    sizes: Sequence[int], *, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[list[int]]:
    """Assign tensors to buckets, the last tensor first, because backward passes end with the first.

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
    """One buffer: the views of its tensors, those that are still missing, and the sum under way."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        self.indices = tuple(indices)
        self.buffer = torch.zeros(
            sum(sizes[i] for i in indices), device=device, dtype=torch.float32
        )
        self.views: dict[int, Tensor] = dict(
            zip(indices, self.buffer.split([sizes[i] for i in indices]), strict=True)
        )
        self.missing = set(indices)
        self.waiter: Waiter | None = None
        self.summed = False
        self.launches = 0


class Buckets:
    """All buckets of a job.

    Args:
        tensors: index and number of elements of each tensor.
        replicas: W, the number of replicas that sum.
        device: of the buffers.
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
        indices = [[tensors[position][0] for position in bucket] for bucket in plan]
        self._buckets = [_Bucket(own, _by_index(sizes), device) for own in indices]
        self._of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._next = 0
        self._transit = TransitTimes(max(sizes, default=-1) + 1)

    def start(self) -> None:
        """Begin an iteration: every tensor is missing."""
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)
        self._next = 0

    def view(self, index: int) -> Tensor:
        """Return the memory for a tensor's gradient; call `filled` once it is written.

        It holds the last mean, which must have been used.
        """
        return self._of[index].views[index]

    def filled(self, index: int) -> None:
        """Note that a tensor's gradient is written. Its bucket leaves once it is
        complete and all earlier ones have left.
        """
        bucket = self._of[index]
        bucket.missing.discard(index)
        self._transit.depart(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            ready = self._buckets[self._next]
            ready.launches += 1
            ready.waiter = self._launch(ready.buffer, self._on_done(ready))
            ready.summed = False
            self._next += 1

    def fill_missing(self) -> None:
        """End the iteration: tensors without a gradient count as zero."""
        for bucket in self._buckets:
            for index in sorted(bucket.missing, reverse=True):
                bucket.views[index].zero_()
                self.filled(index)

    def traffic(self) -> dict[int, Traffic]:
        """Return the traffic of each tensor. Bytes are those of a ring: each
        replica sends 2 (W - 1) / W of a buffer.
        """
        found = {}
        for index, bucket in self._of.items():
            size = bucket.views[index].numel() * FLOAT_BYTES * bucket.launches
            moved = 2 * size * (self._replicas - 1) // self._replicas
            found[index] = Traffic(
                bytes_out=moved, bytes_in=moved, on_way_s=self._transit.total_s(index)
            )
        return found

    def _on_done(self, bucket: _Bucket) -> Callable[[], None]:
        def on_done() -> None:
            for index in bucket.indices:
                self._transit.arrive(index)

        return on_done

    def mean(self, index: int) -> Tensor:
        """Wait for the bucket of a tensor, and return the tensor's mean over all replicas."""
        bucket = self._of[index]
        if bucket.waiter is not None:
            bucket.waiter()
            bucket.waiter = None
        if not bucket.summed:
            bucket.buffer.div_(self._replicas)
            bucket.summed = True
        return bucket.views[index]


def _by_index(sizes: dict[int, int]) -> Sequence[int]:
    found = [0] * (max(sizes) + 1)
    for index, size in sizes.items():
        found[index] = size
    return found
