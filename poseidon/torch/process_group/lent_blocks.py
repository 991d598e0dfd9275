"""Memory of its GPU in which a worker passes large tensors to workers of its host.

    offer     the handle of a block with a pattern, once to each worker of the host
    answer    whether that one has read the pattern; empty: yes, else why not
    lent      a tensor is in a block, with the block's handle the first time
    read      its reader has copied it

Laws:

* A worker lends tensors only to workers that have read its pattern. Before that, and to workers
  that cannot read it, tensors pass through the host's memory. The values are the same.
* Between the processes nothing orders work but these messages. The owner of a block waits on the
  host for its copy before it sends the message, and so does the reader before it answers.
* An owner writes to a block only while no one reads it, and leaves only then.
* The owner waits for no reader: where no block is free, and no more memory is to be lent, a tensor
  passes through the host's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from poseidon.exchange.device import Device, device_of
from ps_server import RemoteProtocolError

LEAST_BLOCK_BYTES = 2**20
MOST_BYTES = 2**28
"""All that a worker lends."""
PATTERN = 1024
FLOAT_BYTES = 4


class Lent(NamedTuple):
    """Where a tensor is.

    Attributes:
        number: of the block, among those of its owner.
        size: bytes.
        handle: of the block; empty: the reader has had it.
    """

    number: int
    size: int
    handle: bytes


@dataclass(slots=True)
class _Block:
    memory: Tensor
    known: set[int] = field(default_factory=set)
    """The workers that have its handle."""
    readers: set[int] = field(default_factory=set)


class LentBlocks:
    """The blocks of one worker, and those of others that it has opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: list[_Block] = []
        self._patterns: dict[int, Tensor] = {}
        """By the worker that is to read it."""
        self._readers: set[int] = set()
        """Workers that read this one's memory."""
        self._opened: dict[tuple[int, int], Tensor] = {}
        """By owner and number."""
        self._offers: list[tuple[int, bytes]] = []
        """Of others, that are not answered."""
        self._device: Device | None = None
        """Of this worker."""
        self.refused = False
        """Whether a worker of the host cannot read this one's memory."""

    def offer(self, rank: int, like: Tensor) -> bytes:
        """Return the handle of a pattern for a worker; empty: it has had one.

        Raises:
            RuntimeError: memory of this GPU cannot be lent.
        """
        with self._lock:
            if rank in self._patterns:
                return b""
            device = device_of(like.device)
            self._patterns[rank] = memory = _pattern().to(like.device)
            device.event().synchronize()
            return device.lend(memory)

    def offered(self, owner: int, handle: bytes) -> None:
        """Take the handle of a pattern of another worker."""
        with self._lock:
            self._offers.append((owner, handle))

    def answers(self, like: Tensor) -> list[tuple[int, str]]:
        """Read the patterns of others; return what to answer to whom.

        Args:
            like: a tensor of this worker's device.
        """
        with self._lock:
            offers, self._offers = self._offers, []
        device, found = device_of(like.device), []
        self._device = device
        for owner, handle in offers:
            problem = ""
            try:
                borrowed = device.borrow(handle)  # kept until the copy has ended
                if not torch.equal(borrowed.clone().cpu(), _pattern()):
                    problem = "a copy has other values than were written"
            except RuntimeError as error:  # torch's own errors are such
                problem = str(error).partition("\n")[0] or "unknown error"
            found.append((owner, problem))
        return found

    def answered(self, rank: int, problem: str) -> bool:
        """Take the answer of another worker; return whether it is the first one that cannot."""
        with self._lock:
            if not problem:
                self._readers.add(rank)
            is_first = bool(problem) and not self.refused
            self.refused |= bool(problem)
            return is_first

    def readers_of(self, ranks: Sequence[int]) -> list[int]:
        """Return which of these workers read this one's memory."""
        with self._lock:
            return [] if self.refused else [rank for rank in ranks if rank in self._readers]

    def put(self, flat: Tensor, readers: Sequence[int]) -> list[Lent]:
        """Copy a tensor to a block, and wait for the copy. Return where it is, for each reader; an
        empty list: no memory is left.
        """
        with self._lock:
            number = self._free_block(flat)
            if number is None:
                return []
            block = self._own[number]
            block.readers.update(readers)
        device = device_of(flat.device)
        _bytes_of(block.memory, flat.nbytes).view(flat.dtype).copy_(flat, non_blocking=True)
        device.event().synchronize()
        found = []
        for reader in readers:
            handle = b""
            if reader not in block.known:
                block.known.add(reader)
                handle = device.lend(block.memory)
            found.append(Lent(number, flat.nbytes, handle))
        return found

    def _free_block(self, flat: Tensor) -> int | None:
        """Return the number of the smallest block that is free and large enough; None: there is
        none.
        """
        sizes = [block.memory.nbytes for block in self._own]
        free = [
            (size, number)
            for number, size in enumerate(sizes)
            if size >= flat.nbytes and not self._own[number].readers
        ]
        if free:
            return min(free)[1]
        size = max(LEAST_BLOCK_BYTES, 1 << (flat.nbytes - 1).bit_length())
        if sum(sizes) + size > MOST_BYTES:
            return None
        self._own.append(_Block(flat.new_empty(size // FLOAT_BYTES, dtype=torch.float32)))
        return len(self._own) - 1

    def take(self, owner: int, lent: Lent, like: Tensor) -> Tensor:
        """Return a copy of a tensor of another worker, on the device of `like`, and of its type.

        Raises:
            RuntimeError: the memory cannot be opened.
            RemoteProtocolError: there is no such memory.
        """
        if lent.handle and self._device is not None:
            self._opened[owner, lent.number] = self._device.borrow(lent.handle)
        memory = self._opened.get((owner, lent.number))
        if self._device is None or memory is None or not 0 < lent.size <= memory.nbytes:
            raise RemoteProtocolError(f"worker {owner} lends no such memory")
        source = _bytes_of(memory, lent.size).view(like.dtype)
        found = torch.empty(source.shape, dtype=like.dtype, device=like.device)
        found.copy_(source, non_blocking=True)
        self._device.event().synchronize()
        return found

    def read(self, number: int, reader: int) -> None:
        """Take note that a worker has read a block."""
        with self._lock:
            if 0 <= number < len(self._own):
                self._own[number].readers.discard(reader)

    def all_read(self, gone: set[int]) -> bool:
        """Return whether no one reads a block any more.

        Args:
            gone: workers that have left.
        """
        with self._lock:
            return all(block.readers <= gone for block in self._own)

    def close(self) -> None:
        """Let go of all memory."""
        with self._lock:
            self._own, self._opened, self._patterns, self._offers = [], {}, {}, []


def _pattern() -> Tensor:
    return torch.arange(1, PATTERN + 1, dtype=torch.float32, device="cpu")


def _bytes_of(memory: Tensor, size: int) -> Tensor:
    """Return the first bytes of a block."""
    return memory.view(torch.uint8)[:size]
