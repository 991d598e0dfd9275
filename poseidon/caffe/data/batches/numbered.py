"""Readers that prepare numbered batches in the background, from any source; the share of the
records that a worker reads; and batches on their way to a GPU.

Laws:

* `next` returns batches 0, 1, 2, ... of a `Maker`. `batches_done` and the seed are the whole state:
  after `skip_to(n)` a reader continues exactly like one that has returned n batches.
* W workers with batch K read together exactly the records that one process with batch W*K reads,
  batch by batch, also across the end of the database and also if its length is not a multiple of W.
  The records form an endless stream (stream record r is database record r mod length); a share is a
  regular subset of it.
* Bytes of pixels are copied to a GPU, and become floats there. These are the floats of
  `Transform.batch`, to the bit: (pixel - mean) * scale, then the mirror, each an operation of its
  own in float32. The host crops, which it does while it copies a record to pinned memory, so that
  only these pixels travel.
"""

from __future__ import annotations

import itertools
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from poseidon.base.paths import own_command, short_path
from poseidon.caffe.data.batches.prefetch import Prefetcher
from poseidon.caffe.data.batches.transform import Transform
from poseidon.errors import DataError
from poseidon.exchange.device import Device, device_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The subset of a database's endless stream of records that one worker reads.

    The stream is distributed round robin, in blocks of `block` records, to `step` readers; this is
    reader `first`. The block is one record in training. It is a batch in testing, so that the
    workers score exactly the batches that one process scores.

    Args:
        first: the index of this reader, 0 <= first < step.
        step: the number of readers of this database.
        block: the number of records in a block, >= 1.
        client: the number of the part of a divided database, 0 <= client < clients.
        clients: the number of parts of the job's records; 1 if all workers read one database.
    """

    first: int = 0
    step: int = 1
    block: int = 1
    client: int = 0
    clients: int = 1

    def __post_init__(self) -> None:
        if not (
            0 <= self.first < self.step and self.block >= 1 and 0 <= self.client < self.clients
        ):
            raise ValueError(f"invalid share: {self!r}")

    def record(self, n: int) -> int:
        """Return the stream record that is this reader's n-th, n >= 0."""
        return int(self.records(n, 1)[0])

    def records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the stream records of this reader's records first, ..., first + count - 1."""
        block, within = np.divmod(np.arange(first, first + count, dtype=np.int64), self.block)
        return (block * self.step + self.first) * self.block + within

    def job_records(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return numbers for the same records that are unique in the job.

        With `block` 1 they are the numbers that one process gives the same records, so that random
        crops and mirrors do not depend on the number of workers.
        """
        return self.records(first, count) * self.clients + self.client

    def fresh_records(self, batch: int, batch_size: int, length: int) -> int:
        """Return how many leading records of batch `batch` belong to the first
        epoch of a source of `length` records.
        """
        return int((self.records(batch * batch_size, batch_size) < length).sum())


def source_for(source: Path, *, shared_file_system: bool, client: int, clients: int) -> Path:
    """Return the database that client `client` of `clients` opens for a layer's `source`.

    With a shared file system this is the source itself, otherwise `<source>_<client>`. A single
    client prefers the undivided source, because a part `_0` beside it would have only some of the
    records.

    Raises:
        DataError: the part is missing, or the source was divided for more clients than the job has.
    """
    if shared_file_system or (clients == 1 and source.exists()):
        return source
    part = part_path(source, client)
    if not part.exists():
        if clients == 1:
            return source
        raise DataError(
            f"client {client} of {clients} reads {part} (shared_file_system is false), which does "
            f"not exist{_instead_of_parts(source, clients)}"
        )
    numbers = itertools.count(clients)
    parts = next(number for number in numbers if not part_path(source, number).exists())
    if parts > clients:
        raise DataError(
            f"{source} was divided for {parts} clients, but this job has {clients}: remove its "
            f"parts, and divide it again with: {_division(source, clients)}"
        )
    return part


def _instead_of_parts(source: Path, clients: int) -> str:
    """Return the end of the sentence on a missing part: what to do."""
    if source.exists():
        return (
            f": write shared_file_system: true if all clients can read {source}, "
            f"or divide it with: {_division(source, clients)}"
        )
    return (
        f", nor does {source}: make it first; then write shared_file_system: true if all clients "
        f"can read it, or divide it with: {_division(source, clients)}"
    )


def _division(source: Path, clients: int) -> str:
    path = shlex.quote(short_path(source))
    return f"{own_command()} partition_data --num_partitions={clients} {path}"


def part_path(source: Path, part: int) -> Path:
    """Return the path of part number `part` of the database `source`: `<source>_<part>`."""
    return source.with_name(f"{source.name}_{part}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches of images to read.

    Attributes:
        batch_size: N.
        seed: the seed of all random choices, the same on all workers of a job.
        rand_skip: start at a random record below this; 0: at the first.
        device: where the batches are wanted.
    """

    batch_size: int
    transform: Transform
    share: Share
    seed: int
    rand_skip: int = 0
    device: torch.device = CPU

    @property
    def sends_bytes(self) -> bool:
        """Whether pixels become floats on the device."""
        return not device_of(self.device).is_host


class Maker(ABC):
    """A source that makes any batch from its number. Only one thread at a time may call it.

    Attributes:
        shape: the shape of the first tensor of every batch, or of the first batch if shapes differ.
        transform: what makes floats of the first two tensors of a batch, on their device, if the
            first has bytes (`DeviceTransform`).
    """

    shape: tuple[int, ...]
    transform: Transform | None = None

    def __init__(self, share: Share, batch_size: int) -> None:
        self._share, self._batch_size = share, batch_size

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records of the source."""

    @abstractmethod
    def tensors(self, number: int) -> tuple[Tensor, ...]:
        """Return batch `number` >= 0, on the CPU.

        Raises:
            DataError: a record of the batch is damaged, or its shape differs from the others.
        """

    def fresh_records(self, number: int) -> int:
        """Return how many leading records of batch `number` are of the source's first epoch."""
        return self._share.fresh_records(number, self._batch_size, len(self))

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the files. No other call may be running. The default does nothing."""


Self = TypeVar("Self", bound="NumberedReader[Maker]")
M = TypeVar("M", bound=Maker, covariant=True)


class NumberedReader(Generic[M]):
    """An endless reader of one worker's batches.

    The thread starts with the first `next`, so a reader that is only asked for its shape costs
    nothing.

    Args:
        source: the source of the records, for error messages.
        maker: the maker of the batches, closed with the reader.
        prefetch: the number of batches to prepare ahead, >= 1.
        device: to which the thread copies them.
    """

    def __init__(
        self, source: Path, maker: M, *, prefetch: int = 4, device: torch.device = CPU
    ) -> None:
        self.source = source
        self.maker = maker
        self._sender = None if device_of(device).is_host else BatchSender(device)
        self._prefetch = prefetch
        self._depth = max(1, prefetch)
        self._batches_done = 0
        self._prefetcher: Prefetcher[tuple[Tensor, ...]] | None = None
        self._closed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first tensor of every batch, or of the first batch if shapes differ."""
        return self.maker.shape

    @property
    def batches_done(self) -> int:
        """The number of batches that `next` returned or `skip_to` skipped; not those made ahead."""
        return self._batches_done

    def fresh_records(self, number: int) -> int:
        """Return how many leading records of batch `number` are of the source's first epoch.

        Zero means that the epoch has ended. Call it before the first `next`, because LevelDB counts
        records by reading.
        """
        return self.maker.fresh_records(number)

    @property
    def ready(self) -> int:
        """The number of batches that `next` would return without waiting."""
        return self._prefetcher.ready if self._prefetcher is not None else 0

    def divide_prefetch(self, readers: int) -> None:
        """Prepare fewer batches ahead, at least one, because as many readers take turns.

        If their number changes, those that are prepared are made again.
        """
        depth = max(1, self._prefetch // readers)
        if depth != self._depth:
            self._stop()
            self._depth = depth

    def next(self) -> tuple[Tensor, ...]:
        """Return the next batch: float32 tensors on the device, or bytes (`Maker.transform`).

        The caller owns the tensors. Memory on the CPU is reused after they are freed. A tensor of a
        GPU is of a different stream: `Device.keep` it.

        Raises:
            DataError: a record of the batch is damaged or has a different shape, or the reader is
                closed.
        """
        if self._closed:
            raise DataError(f"the reader of {self.source} is closed")
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._make,
                first=self._batches_done,
                depth=self._depth,
                name=f"poseidon-read-{self.source.name}",
            )
        batch = self._prefetcher.get()
        self._batches_done += 1
        return batch

    def _make(self, number: int) -> tuple[Tensor, ...]:
        made = self.maker.tensors(number)
        return made if self._sender is None else self._sender.send(made)

    def skip_to(self, batches: int) -> None:
        """Continue as if exactly `batches` >= 0 batches had been returned."""
        self._stop()
        self._batches_done = batches

    def close(self) -> None:
        """Stop the background thread and close the source. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stop()
            self.maker.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


class BatchSender:
    """Copies batches to a device on a stream of its own, in the thread that makes them.

    Args:
        device: where they are wanted; not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = device
        self._device: Device = device_of(device)
        self._stream = self._device.stream()

    def send(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a batch on the device. Its memory on the host is free again."""
        with self._device.on(self._stream):
            there = tuple(
                torch.empty(part.shape, dtype=part.dtype, device=self._torch).copy_(
                    part, non_blocking=True
                )
                for part in batch
            )
            copied = self._device.event()
        copied.synchronize()
        return there


class DeviceTransform:
    """Makes floats of the bytes of a batch, on their device. No operation waits for it."""

    def __init__(self, transform: Transform, device: torch.device) -> None:
        mean = transform.mean
        self._mean = None if mean is None else torch.from_numpy(mean).to(device)
        extent = max(mean.shape[1:]) if mean is not None and transform.has_window_of_mean else 0
        self._steps = torch.arange(extent).to(device) if extent else None
        self._scale, self._mirrors = float(transform.scale), transform.mirrors

    def __call__(self, pixels_NChw: Tensor, places_N3: Tensor) -> Tensor:
        """Return the floats of cropped bytes.

        Args:
            places_N3: row and column of each crop in the image, and whether it is mirrored
                (`Transform.crop_into`).
        """
        out = pixels_NChw.float()
        if self._mean is not None:
            out.sub_(self._mean_of(pixels_NChw.shape[2:], places_N3))
        if self._scale != 1:
            out.mul_(self._scale)
        if self._mirrors:
            mirrored = places_N3[:, 2].ne(0).view(-1, 1, 1, 1)
            out = torch.where(mirrored, out.flip(3), out)
        return out

    def _mean_of(self, size: Sequence[int], places_N3: Tensor) -> Tensor:
        """Return the mean at the pixels of each crop."""
        assert self._mean is not None
        if self._steps is None:
            return self._mean
        rows = places_N3[:, 0:1] + self._steps[: size[0]]
        columns = places_N3[:, 1:2] + self._steps[: size[1]]
        return self._mean[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)
