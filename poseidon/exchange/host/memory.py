"""The memory that the workers of a host share: what each contributes to the pieces of others, and
the values of all pieces.

The pieces of an owner lie together: each piece's value, then a place for each part that a worker
other than the owner contributes, in float32, each at the beginning of a cache line. Law: a place has
one writer at a time; the messages of the workers say which (`group.py`). An owner publishes a value
once, and the next one only after each worker has taken it and has contributed to the sum.

    GPUs          each owner's pieces are in the memory of its GPU. The others copy their parts into
                  it, and the values out of it, between the GPUs
    host memory   where GPUs cannot, and on CPUs: one file for all owners, pinned for GPUs. It has no
                  name: it exists only as an open descriptor, which the processes pass over their
                  connections, so nothing of it is left when they have ended, however they ended

GPUs are used where all workers of the host have found them to work: each has written a pattern to
the memory of each other worker and read one from it, and each finds in its own memory what the
others have written.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgpack
import torch
from torch import Tensor

from poseidon.errors import limit_reached
from poseidon.exchange.device import DONE, Event, device_of
from poseidon.exchange.host.group import HostGroup
from poseidon.exchange.host.pieces import FlatPiece, HostPieces
from poseidon.exchange.job_control import JobControl
from ps_server import RemoteProtocolError, TransportError
from ps_server.transport.base import Buffer

LOGGER = logging.getLogger(__name__)
FLOAT_BYTES = 4
LINE_FLOATS = 16
PATTERN_FLOATS = 16 * 1024
"""Of what each pair of workers writes and reads at the start: 64 KiB."""


class HostMemory:
    """The shared memory, as one worker sees it. All workers of the host make it together.

    Args:
        pieces: of the tensors, whose device copies to and from the memory.
        group: of the workers.
        control: has the requests of rank 0.

    Attributes:
        device: of the tensors.
        values: of each piece.
        on_gpus: whether pieces are in the memory of GPUs.

    Raises:
        TransportError: there is not so much memory.
        PeerLost: a worker has gone.
    """

    def __init__(self, pieces: HostPieces, group: HostGroup, control: JobControl) -> None:
        self._pieces, self._group, self._control = pieces, group, control
        like = pieces.tensors[0].tensor if pieces.tensors else torch.empty(0)
        counts = [len(group.tree.parts(worker)) for worker in range(group.size)]
        parts = [
            [
                0 if piece.index in pieces.by_factors or worker == piece.plane else count
                for worker, count in enumerate(counts)
            ]
            for piece in pieces.all
        ]
        self.device = device_of(like.device)
        floats = [0] * group.size
        for piece, counts in zip(pieces.all, parts, strict=True):
            floats[piece.plane] += _lines(piece.size) * (1 + sum(counts))
        found = _of_gpus(floats, group, like) if pieces.all else None
        self.on_gpus = found is not None
        self._file = torch.empty(0) if found else _of_file(sum(floats), group.file)
        self._is_pinned = self.device.pin(self._file)
        if not (self._is_pinned or group.rank):
            LOGGER.warning(
                "the memory that the workers of this machine share cannot be pinned; copies between "
                "it and their GPUs are slow"
            )
        memories = found or list(self._file.split(floats))
        ends = [0] * len(floats)

        def take(piece: FlatPiece) -> Tensor:
            start = ends[piece.plane]
            ends[piece.plane] += _lines(piece.size)
            return memories[piece.plane][start : start + piece.size]

        self.values = [take(piece) for piece in pieces.all]
        self._parts = [
            [[take(piece) for _ in range(count)] for count in counts]
            for piece, counts in zip(pieces.all, parts, strict=True)
        ]
        self._come = [0] * len(pieces.all)  # values that this worker has not taken
        self._marks: list[Event] = [DONE] * len(pieces.all)
        self._requests = 0  # that the owners of these values have seen
        group.peers.on("Values", None, self._note_values)

    def parts(self, piece: int, worker: int) -> list[Tensor]:
        """Return the places of a worker's parts of a piece: its owner and the worker use them."""
        return self._parts[piece][worker]

    def publish(self, numbers: Sequence[int]) -> None:
        """Let all workers of the host take the new values of some of this worker's pieces."""
        mark = self.device.event()
        mark.synchronize()
        group = self._group
        group.send(group.others, "Values", len(self._control.requests), *numbers)
        with group.monitor:
            for number in numbers:
                self._come[number] += 1
                self._marks[number] = mark
            group.monitor.notify()

    def _note_values(self, sender: int, fields: Sequence[int], _: Buffer) -> None:
        requests, *numbers = fields
        for number in numbers:
            if not 0 <= number < len(self._come) or self._pieces.all[number].plane != sender:
                raise RemoteProtocolError(f"it publishes piece {number}, which it does not own")
        for number in numbers:
            self._come[number] += 1
        self._requests = max(self._requests, requests)

    def take(self, number: int, owes: Callable[[int], bool]) -> None:
        """Wait for the next value of a piece, and let the tensor have it.

        Args:
            owes: returns whether a worker has not contributed all to this worker's own pieces.
        """
        group, piece = self._group, self._pieces.all[number]

        def has_come() -> bool | None:
            if self._come[number]:
                self._come[number] -= 1
                return True
            is_own = piece.plane == group.rank
            group.check_left(owes if is_own else lambda rank: rank == piece.plane)
            return None

        name = self._pieces.tensors[piece.index].name
        group.monitor.wait_for(has_come, f"tensor '{name}' did not come")
        self.device.wait(self._marks[number])
        if piece.plane != group.rank:
            self._pieces.values[number].copy_(self.values[number], non_blocking=True)
            if self._requests:
                self._control.await_requests(self._requests)

    def give_back(self) -> None:
        """Let go of what is in the memory of others, before they free it."""
        self.device.synchronize()
        for number, piece in enumerate(self._pieces.all):
            if piece.plane != self._group.rank:
                self.values[number], self._parts[number] = torch.empty(0), []

    def close(self) -> None:
        """Free the memory: it goes with the last of its views. Safe to call twice."""
        self.device.synchronize()
        if self._is_pinned:
            self.device.unpin(self._file)
        self.values, self._parts, self._file = [], [], torch.empty(0)


def _lines(floats: int) -> int:
    return -(-floats // LINE_FLOATS) * LINE_FLOATS


def _of_file(floats: int, file: int) -> Tensor:
    """Return all of the file, as so many numbers."""
    length = max(floats * FLOAT_BYTES, 1)
    try:
        if os.fstat(file).st_size < length:
            os.ftruncate(file, length)
        mapped = mmap.mmap(file, length)
    except (OSError, ValueError) as error:
        raise TransportError(
            f"the workers of this machine cannot share {max(1, length >> 20)} MiB of memory: "
            + (
                limit_reached(error)
                or f"{getattr(error, 'strerror', None) or error}; free as much memory, or put "
                "fewer workers on this machine"
            )
        ) from error
    return torch.frombuffer(mapped, dtype=torch.float32, count=floats) if floats else torch.empty(0)


def _of_gpus(floats: Sequence[int], group: HostGroup, like: Tensor) -> list[Tensor] | None:
    """Return the memory of each worker's GPU, so many numbers; None: they do not share it."""
    device, rank = device_of(like.device), group.rank
    memories: dict[int, Tensor] = {}
    lent: dict[int, bytes] = {}
    problems: list[str] = []

    def slot(owner: int, writer: int) -> Tensor:
        return memories[owner][writer * PATTERN_FLOATS : (writer + 1) * PATTERN_FLOATS]

    def pattern(owner: int, writer: int) -> Tensor:
        first = 1 + PATTERN_FLOATS * (owner * len(floats) + writer)
        last = first + PATTERN_FLOATS
        return torch.arange(first, last, dtype=torch.float32, device="cpu")

    def write(owner: int) -> None:
        slot(owner, rank).copy_(pattern(owner, rank).to(like.device))

    def check(owner: int, writer: int) -> None:
        if not torch.equal(slot(owner, writer).clone().cpu(), pattern(owner, writer)):
            raise RuntimeError("a copy has other values than were written")

    @contextmanager
    def trying(owner: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's own errors are such
            what = str(error).partition("\n")[0]
            problems.append(
                f"{group.network.name(rank)}, GPU of {group.network.name(owner)}: {what}"
            )

    def trade_problems() -> None:
        every = group.meetings.gather("".join(problems[:1]).encode()).result()
        problems.extend(every[other].decode() for other in group.others if every[other])

    if not device.is_host:
        with trying(rank):
            numbers = len(floats) * PATTERN_FLOATS + floats[rank]
            memories[rank] = like.new_zeros(numbers, dtype=torch.float32)
            write(rank)
            device.synchronize()
            lent = {other: device.lend(memories[rank]) for other in group.others}
    offers = group.meetings.gather(msgpack.packb(lent)).result()
    handles = [msgpack.unpackb(offer, strict_map_key=False) for offer in offers]
    if device.is_host and not any(handles):
        return None
    for other in group.others:
        with trying(other):
            memories[other] = device.borrow(handles[other].get(rank, b""))
            write(other)
            check(other, other)
    device.synchronize()
    trade_problems()
    if not problems:
        for other in group.others:
            with trying(other):
                check(rank, other)
    trade_problems()
    if not problems:
        return [memories[worker][len(floats) * PATTERN_FLOATS :] for worker in range(len(floats))]
    device.synchronize()
    if not rank:
        LOGGER.warning(
            "the GPUs of this machine do not share memory (%s); its workers exchange through the "
            "host's memory",
            sorted(problems)[0],
        )
    return None
