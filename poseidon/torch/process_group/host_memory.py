"""What passes between workers of one host in memory: large payloads in memory of the host, and large
tensors of a GPU within the GPUs of the host.

    ["Shared", ...]                 the place of a payload in memory of the host
    ["Lent", ...]                   the place of a tensor in memory of the sender's GPU
    ["Taken", number] empty         what was lent in this block is copied
    ["Offer"] handle                of a pattern in memory of the sender's GPU
    ["Reads"] problem               the pattern could be read, if empty

A block is a memory without a name: a page of flags, a byte for each receiver of a payload, then the
payload. It is written once, whatever the number of its receivers, and read where it is. Its sender
keeps it for later payloads.

Laws:
* A flag has one writer at a time. The sender sets it with the payload (`_SENT`). The receiver's
  connections note that they have the block open (`_OPEN`), and clear it once nothing refers to the
  payload any more (`_FREE`).
* A sender writes to a block only while all its flags are clear, and leaves only once no flag is
  `_SENT`: the memory lives as long as any process has it open.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgpack
import numpy as np
from torch import Tensor

from poseidon.errors import printable
from poseidon.exchange.worker_links import unpacked
from poseidon.torch.process_group.late_links import LateLinks
from poseidon.torch.process_group.lent_blocks import Lent, LentBlocks
from ps_server import RemoteProtocolError, TransportError
from ps_server.shared_memory import PAGE_BYTES, new_memory, open_memory, whole_pages
from ps_server.transport.base import Buffer

LOGGER = logging.getLogger(__name__)


LEAST_BYTES = 32 * 1024
"""Payloads of fewer bytes travel in their message."""
_FREE, _SENT, _OPEN = 0, 1, 2
_ALL_FREE = bytes(PAGE_BYTES)


class Place(NamedTuple):
    """Where a payload is, as its message says.

    Attributes:
        process: the sender's id.
        file: its descriptor of the block.
    """

    process: int
    file: int
    block_bytes: int
    payload_bytes: int


class SharedBlocks:
    """The blocks of one worker: its own, and those of others that it has opened."""

    def __init__(self) -> None:
        self._own: dict[int, mmap.mmap] = {}
        """By their descriptors."""
        self._opened: dict[Place, mmap.mmap] = {}
        self._in_use: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        self._lock = threading.Lock()

    def put(self, payload: Buffer, receivers: int) -> Place | None:
        """Copy a payload to a block, for so many receivers; None where the system has no such
        memory.
        """
        size = memoryview(payload).nbytes
        with self._lock:
            found = self._free_block(size)
            if found is None:
                return None
            file, memory = found
            memory[:receivers] = bytes([_SENT]) * receivers
        target = np.frombuffer(memory, np.uint8, size, PAGE_BYTES)
        np.copyto(target, np.frombuffer(payload, np.uint8))
        return Place(os.getpid(), file, len(memory), size)

    def _free_block(self, size: int) -> tuple[int, mmap.mmap] | None:
        """Return the smallest block that is free and large enough; a new one if there is none."""
        free = [
            (len(memory), file)
            for file, memory in self._own.items()
            if len(memory) >= PAGE_BYTES + size and memory[:PAGE_BYTES] == _ALL_FREE
        ]
        if free:
            file = min(free)[1]
            return file, self._own[file]
        if (made := new_memory(PAGE_BYTES + whole_pages(size))) is not None:
            self._own[made[0]] = made[1]
        return made

    def get(self, place: Place, number: int) -> Buffer:
        """Return a payload of another worker of this host, as a view of its block.

        Args:
            number: of this receiver among the payload's.

        Raises:
            RemoteProtocolError: the place cannot be.
            TransportError: the block cannot be opened.
        """
        if not (
            0 <= number < PAGE_BYTES and 0 < place.payload_bytes <= place.block_bytes - PAGE_BYTES
        ):
            raise RemoteProtocolError("shared memory has no payload at this place")
        block = place._replace(payload_bytes=0)
        memory = self._opened.get(block)
        if memory is None:
            memory = open_memory(place.process, place.file, place.block_bytes)
            if memory is None:
                raise TransportError(
                    f"this worker cannot open memory of process {place.process}, a worker of its "
                    "host; expected workers of one host that see each other's /proc"
                )
            self._opened[block] = memory
        memory[number] = _OPEN
        array = (ctypes.c_ubyte * place.payload_bytes).from_buffer(memory, PAGE_BYTES)
        self._release_with(array, memory, number)
        return memoryview(array).cast("B")

    def _release_with(
        self, array: ctypes.Array[ctypes.c_ubyte], memory: mmap.mmap, number: int
    ) -> None:
        key = id(array)

        def release(_: object) -> None:
            self._in_use.pop(key, None)
            memory[number] = _FREE

        self._in_use[key] = weakref.ref(array, release)

    @property
    def all_open(self) -> bool:
        """Whether the receivers of all payloads have their blocks open."""
        return all(memory.find(bytes([_SENT]), 0, PAGE_BYTES) < 0 for memory in self._own.values())

    def close(self) -> None:
        """Put no more payloads. What others have open stays."""
        with self._lock:
            for file in self._own:
                os.close(file)
            self._own = {}


class HostMemory:
    """The memory that one worker shares with others of its host."""

    def __init__(self, links: LateLinks, neighbours: Collection[int]) -> None:
        self.neighbours = frozenset(neighbours) | {links.network.rank}
        self._links = links
        self._rank = links.network.rank
        self._shared = SharedBlocks()
        self._lent = LentBlocks()

    def put(self, payload: Buffer, receivers: Sequence[int]) -> dict[int, bytes]:
        """Copy a large payload to memory for its receivers on this host. Return what their messages
        have in its place, by rank; other receivers get the payload itself.
        """
        near = self._near(receivers) if memoryview(payload).nbytes >= LEAST_BYTES else ()
        place = self._shared.put(payload, len(near)) if near else None
        if place is None:
            return {}
        return {rank: msgpack.packb([*place, number]) for number, rank in enumerate(near)}

    def lends_to(self, ranks: Collection[int]) -> bool:
        """Return whether large tensors of a GPU may pass between this worker and one of these
        others within the GPUs of this host. No other worker has to know.
        """
        return not self._lent.refused and bool(self._near(ranks))

    def lend(self, receivers: Sequence[int], head: Sequence[object], tensor: Tensor) -> list[int]:
        """Send a tensor of this worker's GPU to those that can read it there, and wait until it is
        there; return the others.

        Args:
            head: of its messages.
        """
        left = list(receivers)
        if tensor.nbytes < LEAST_BYTES or not self.lends_to(receivers):
            return left
        self.answer_offers(tensor)
        for rank in self._near(receivers):
            try:
                handle = self._lent.offer(rank, tensor)
            except RuntimeError as error:  # torch's own errors are such
                self._note_reader(rank, str(error).partition("\n")[0])
                return left
            if handle:
                self._links.post(["Offer"], ([rank], handle))
        readers = self._lent.readers_of(receivers)
        places = self._lent.put(tensor, readers) if readers else []
        for reader, place in zip(readers, places, strict=False):
            self._links.post(["Lent", *head], ([reader], msgpack.packb(place)))
            left.remove(reader)
        return left

    def answer_offers(self, like: Tensor) -> None:
        """Answer the workers that would lend memory of their GPUs.

        Args:
            like: a tensor of this worker's GPU.
        """
        for owner, problem in self._lent.answers(like):
            self._links.post(["Reads"], ([owner], problem.encode()))

    def take(self, sender: int, lent: Lent, like: Tensor) -> Tensor:
        """Return a copy of what a worker has lent, on the device of `like`."""
        found = self._lent.take(sender, lent, like)
        self._links.post(["Taken", lent.number], ([sender], b""))
        return found

    def payload(self, kind: str, sender: int, frame: Buffer) -> Buffer | Lent:
        """Return the payload of a message "Shared" or "Lent".

        Raises:
            RemoteProtocolError: the sender is of another host, or the place cannot be.
            TransportError: the memory cannot be opened.
        """
        match kind, unpacked(frame) if sender in self.neighbours else None:
            case "Shared", [int(process), int(file), int(block), int(size), int(number)]:
                return self._shared.get(Place(process, file, block, size), number)
            case "Lent", [int(number), int(size), bytes(handle)]:
                return Lent(number, size, handle)
            case _:
                raise RemoteProtocolError(f"worker {sender} does not share memory with this worker")

    def hear(self, sender: int, header: Sequence[object], frame: Buffer) -> None:
        """Take any other message.

        Raises:
            RemoteProtocolError: it is not valid.
        """
        match header:
            case ["Taken", int(number)]:
                self._lent.read(number, sender)
            case ["Offer"] if sender in self.neighbours:
                self._lent.offered(sender, bytes(frame))
            case ["Reads"] if sender in self.neighbours:
                self._note_reader(sender, bytes(frame).decode(errors="backslashreplace"))
            case _:
                raise RemoteProtocolError("a peer sent something that is not data")

    def is_done(self, left: set[int]) -> bool:
        """Return whether nobody needs the memory of this worker any more.

        Args:
            left: the workers that have left.
        """
        is_read = self._shared.all_open and self._lent.all_read(left)
        return is_read or left.issuperset(self.neighbours - {self._rank})

    def close(self) -> None:
        """Let go of all memory."""
        self._shared.close()
        self._lent.close()

    def _near(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.neighbours and rank != self._rank]

    def _note_reader(self, sender: int, problem: str) -> None:
        if self._lent.answered(sender, problem) and self._rank == min(self.neighbours):
            LOGGER.warning(
                "the GPUs of this machine do not share memory (worker %d, GPU of worker %d: %s); "
                "torch.distributed passes their tensors through the host's memory",
                sender,
                self._rank,
                printable(problem),
            )
