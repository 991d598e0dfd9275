"""Collectives that are under way: started now, waited for later.

Small sums share one message, a bucket. So do small sums and copies between the devices of this
process, where the message is one call.

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
from torch.cuda import nccl

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


class DevicesOfProcess:
    """What all devices of this process do with a tensor on each of them.

    Args:
        tensors: one of each device.
        root: the device whose tensor all get; None: all get the sum.
    """

    def __init__(self, tensors: Sequence[Tensor], root: int | None = None) -> None:
        self.size = len(tensors)
        self._devices = [tensor.device for tensor in tensors]
        self._root = root

    def joins(self, other: object) -> bool:
        """Return whether the tensors of both may share a call."""
        return (
            isinstance(other, DevicesOfProcess)
            and other._devices == self._devices
            and other._root == self._root
        )

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what of them is read."""
        return list(tensors) if self._root is None else [tensors[self._root]]

    def start_all_reduce(
        self, parts: Sequence[Tensor], owned: bool = False
    ) -> Callable[[], list[Tensor]]:
        """Start the call; return what returns the results, one on each device."""
        results = self._sums(parts) if self._root is None else self._copies(parts[0])
        return lambda: results

    def _copies(self, source: Tensor) -> list[Tensor]:
        return [source.to(device, copy=True) for device in self._devices]

    def _sums(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if not have_a_gpu_each(parts):
            return self._copies(local_sum(parts))
        sums = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        nccl.all_reduce([part.contiguous() for part in parts], sums)
        return sums


def have_a_gpu_each(tensors: Sequence[Tensor]) -> bool:
    """Return whether they are on several GPUs, one on each."""
    places = [tensor.get_device() for tensor in tensors]
    return min(places) >= 0 and 1 < len(set(places)) == len(places)


World = CommonWorld | DevicesOfProcess


def _may_share(one: World, other: World) -> bool:
    """Return whether sums of both may share a call."""
    if isinstance(one, DevicesOfProcess) or isinstance(other, DevicesOfProcess):
        return isinstance(one, DevicesOfProcess) and one.joins(other)
    return one.joins(other)


class Buckets:
    """The collectives of one run of a net."""

    def __init__(self) -> None:
        self._open: list[_Bucket] = []
        self._worlds: list[World] = []

    def all_reduce(self, world: World, tensors: Sequence[Tensor], owned: bool = False) -> Pending:
        """Start the sum over all tensors of all shards, or put it into a bucket.

        Args:
            world: of the shards, or of the devices of this process.
            tensors: of one shape and type, on any devices; they may change afterwards.
            owned: whether the first tensor may be overwritten: copying a large one takes longer.
        """
        world = self._first_like(world)
        size = tensors[0].numel() * tensors[0].element_size()
        if world.size == 1 or size >= BUCKET_BYTES:
            parts = world.parts(tensors) if isinstance(world, DevicesOfProcess) else tensors
            return Pending(world.start_all_reduce(parts, owned))
        bucket = next((one for one in self._open if one.takes(world, tensors[0])), None)
        if bucket is not None and bucket.bytes + size > BUCKET_BYTES:
            self._open.remove(bucket)
            bucket.start()
            bucket = None
        if bucket is None:
            bucket = _Bucket(world, tensors[0].dtype)
            self._open.append(bucket)
        return bucket.add(tensors)

    def _first_like(self, world: World) -> World:
        """Return the first world that can take a world's sums: few sums at a time are faster."""
        for known in self._worlds:
            if _may_share(known, world):
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

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        self.bytes = 0
        self._world, self._dtype = world, dtype
        self._parts: list[list[Tensor]] = []
        """Of each member: one, or one of each device."""
        self._likes: list[Sequence[Tensor]] = []
        self._pending: list[Pending] = []
        self._lock = threading.Lock()
        self._wait: Callable[[], list[Tensor]] | None = None
        self._result: list[list[Tensor]] | Exception | None = None

    def takes(self, world: World, tensor: Tensor) -> bool:
        """Return whether a sum may share this bucket."""
        return self._dtype == tensor.dtype and _may_share(self._world, world)

    def add(self, tensors: Sequence[Tensor]) -> Pending:
        self.bytes += tensors[0].numel() * tensors[0].element_size()
        if isinstance(self._world, DevicesOfProcess):
            self._parts.append(self._world.parts(tensors))
        else:
            self._parts.append([local_sum(tensors)])
        self._likes.append(tensors)
        self._pending.append(Pending())
        return self._pending[-1]

    def start(self) -> None:
        """Start the sum of all tensors as one; a single one keeps its shape."""
        wholes = self._parts[0]
        if len(self._parts) > 1:
            wholes = [
                torch.cat([part.reshape(-1).to(column[0].device) for part in column])
                for column in zip(*self._parts, strict=True)
            ]
        self._wait = self._world.start_all_reduce(wholes)
        for number, pending in enumerate(self._pending):
            pending.start(functools.partial(self._result_of, number))

    def _result_of(self, number: int) -> list[Tensor]:
        """Wait for the sum; return the part of one member, on the devices of its tensors."""
        with self._lock:
            if self._result is None:
                self._result = self._unpack()
            if isinstance(self._result, Exception):
                raise self._result
            found = self._result[number]
        others = self._likes[number][len(found) :]
        return [*found, *(found[0].to(other.device, copy=True) for other in others)]

    def _unpack(self) -> list[list[Tensor]] | Exception:
        assert self._wait is not None
        try:
            wholes = self._wait()
        except Exception as error:  # noqa: BLE001 (raised for each member)
            return error
        if len(self._parts) == 1:
            return [wholes]
        sizes = [parts[0].numel() for parts in self._parts]
        by_member = zip(*(whole.split(sizes) for whole in wholes), strict=True)
        found = [
            [piece.view(parts[0].shape) for piece in pieces]
            for parts, pieces in zip(self._parts, by_member, strict=True)
        ]
        if isinstance(self._world, DevicesOfProcess):
            return found
        return [
            [piece.to(parts[0].device, copy=True) for piece in pieces]
            for parts, pieces in zip(self._parts, found, strict=True)
        ]
