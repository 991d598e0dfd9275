"""Collectives that are under way: started now, waited for later.

Small sums share one message, a bucket.

    buckets = Buckets()
    first, second = buckets.all_reduce(world, [a]), buckets.all_reduce(world, [b])
    buckets.flush()
    (a,), (b,) = first.wait(), second.wait()

Law: which sums share a bucket follows from the order of the calls and from the sizes of the
tensors, so it is the same on all shards and in every run. All shards call the same methods in the
same order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.shards.common_world import CommonWorld, local_sum

BUCKET_BYTES = 2**20
"""The size of a bucket, at most. A tensor of this size or larger is a message of its own."""


class Pending:
    """A collective that waits for the other shards.

    Attributes:
        started: whether it has been started; a sum in a bucket that is not full has not.
    """

    def __init__(self, finish: Callable[[], Any] | None = None) -> None:
        self.started = finish is not None
        self._finish = finish

    def start(self, finish: Callable[[], Any]) -> None:
        """Note that it was started; `finish` waits for it and returns its result."""
        self._finish, self.started = finish, True

    def wait(self) -> Any:
        """Wait, and return a sequence of the results: one for each tensor.

        Raises:
            CollectiveError: a shard is lost.
        """
        assert self._finish is not None, "not started"
        return self._finish()


class Buckets:
    """The collectives of one run of a net."""

    def __init__(self) -> None:
        self._open: list[_Bucket] = []
        self._worlds: list[CommonWorld] = []

    def all_reduce(
        self, world: CommonWorld, tensors: Sequence[Tensor], owned: bool = False
    ) -> Pending:
        """Start the sum over all tensors of all shards, or put it into a bucket.

        Args:
            world: of the shards.
            tensors: of one shape and type, on any devices; they may change afterwards.
            owned: whether the first tensor may be overwritten: copying a large one takes longer.
        """
        world = self._first_like(world)
        size = tensors[0].numel() * tensors[0].element_size()
        if world.size == 1 or size >= BUCKET_BYTES:
            return Pending(world.start_all_reduce(tensors, owned))
        bucket = next((one for one in self._open if one.takes(world, tensors[0])), None)
        if bucket is not None and bucket.bytes + size > BUCKET_BYTES:
            self._open.remove(bucket)
            bucket.start()
            bucket = None
        if bucket is None:
            bucket = _Bucket(world, tensors[0].dtype)
            self._open.append(bucket)
        return bucket.add(tensors)

    def _first_like(self, world: CommonWorld) -> CommonWorld:
        """Return the first world that can take a world's sums: few sums at a time are faster."""
        for known in self._worlds:
            if known.joins(world):
                return known
        self._worlds.append(world)
        return world

    def broadcast(self, world: CommonWorld, tensors: Sequence[Tensor], root: int) -> Pending:
        """Start to copy the first tensor of the shard `root`."""
        return Pending(world.start_broadcast(tensors, root))

    def barrier(self, world: CommonWorld) -> Pending:
        """Report that this shard is here."""
        return Pending(world.start_barrier())

    def flush(self) -> None:
        """Start the sums in buckets that are not full."""
        buckets, self._open = self._open, []
        for bucket in buckets:
            bucket.start()


class _Bucket:
    """Tensors of one type that are summed as one."""

    def __init__(self, world: CommonWorld, dtype: torch.dtype) -> None:
        self.bytes = 0
        self._world, self._dtype = world, dtype
        self._parts: list[Tensor] = []
        self._likes: list[Sequence[Tensor]] = []
        self._pending: list[Pending] = []
        self._lock = threading.Lock()
        self._wait: Callable[[], list[Tensor]] | None = None
        self._result: list[Tensor] | Exception | None = None

    def takes(self, world: CommonWorld, tensor: Tensor) -> bool:
        """Return whether a sum may share this bucket."""
        return self._dtype == tensor.dtype and self._world.joins(world)

    def add(self, tensors: Sequence[Tensor]) -> Pending:
        self.bytes += tensors[0].numel() * tensors[0].element_size()
        self._parts.append(local_sum(tensors))
        self._likes.append(tensors)
        self._pending.append(Pending())
        return self._pending[-1]

    def start(self) -> None:
        """Start the sum of all tensors as one; a single one keeps its shape."""
        whole = self._parts[0]
        if len(self._parts) > 1:
            whole = torch.cat([part.reshape(-1).to(whole.device) for part in self._parts])
        self._wait = self._world.start_all_reduce([whole])
        for number, pending in enumerate(self._pending):
            pending.start(functools.partial(self._result_of, number))

    def _result_of(self, number: int) -> list[Tensor]:
        """Wait for the sum; return the part of one member, on the devices of its tensors."""
        with self._lock:
            if self._result is None:
                self._result = self._unpack()
            if isinstance(self._result, Exception):
                raise self._result
            total = self._result[number]
        return [total, *(total.to(other.device, copy=True) for other in self._likes[number][1:])]

    def _unpack(self) -> list[Tensor] | Exception:
        assert self._wait is not None
        try:
            (whole,) = self._wait()
        except Exception as error:  # noqa: BLE001 (raised for each member)
            return error
        if len(self._parts) == 1:
            return [whole]
        pieces = whole.split([part.numel() for part in self._parts])
        return [
            piece.to(part.device, copy=True).view(part.shape)
            for piece, part in zip(pieces, self._parts, strict=True)
        ]
