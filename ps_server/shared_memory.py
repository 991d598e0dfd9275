"""Shared-memory transport: large arrays pass between a worker and a shard of one host in memory,
not through a socket.

The worker makes a segment of memory and offers it (`MemoryOffer`) to each shard at an address of
its own host. The shard answers whether it has opened it (`MemoryAnswer`). From then on each side
writes its large arrays to slots of the segment, a row of slots for each direction, and sends a
packet as one frame, with the numbers of slots in place of these arrays. The receiver works on an
array where it is.

Laws:

* All messages still travel through the socket, so their order, and which are legal, are the same
  with and without. Nothing waits for a slot: a packet with an array that finds none free is sent
  as it is, and so are all where the memory could not be shared.
* A slot has one writer at a time. The sender sets its flag. The receiver clears it once nothing
  refers to the array any more; the sender clears it again where the packet was not sent.
* A sender may keep a slot for an array that it sends again and again (`allocate`), and then sends
  no copy of it. It writes to it only when the receiver has read what was sent; a receiver that
  reads later makes a copy. The receiver frees no such slot; the sender does, once nothing refers to
  the array.
* The memory has no name, and is gone with the two processes, however they ended. It is sealed: no
  peer can make it shorter while the other one uses it. A shard opens nothing but a sealed memory of
  its own user that begins with the nonce of the offer.
* What a slot holds is as little trusted as any frame. A peer that sends nonsense harms no memory
  but the segment. It could change a value that a shard keeps there: no more than by its gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps_server.errors import RemoteProtocolError
from ps_server.protocol.messages import MemoryAnswer, MemoryOffer
from ps_server.protocol.placement import Chunk
from ps_server.transport.base import Buffer, Frames

NONCE_BYTES = 16
LEAST_BYTES = 64 * 1024
"""Arrays of fewer bytes cost as much either way."""
SPARE_SLOTS = 8
"""In each direction, beside two for each array: one that is in use, and the one that replaces
it.
"""
PAGE_BYTES = 4096
_NAME = "poseidon"
_WORKER, _SHARD = 0, 1
_MARKER = 0xC1
"""A first byte that msgpack never writes, so that no header looks like a list of slots."""
_COUNT = struct.Struct("<BI")
"""`_MARKER`, frames of the packet."""
_ENTRY = struct.Struct("<II")
"""Of a frame: where it is, bytes. It is in the slot of this number, or behind all entries."""
_HERE = 0xFFFFFFFF
_KEPT = 1 << 31
"""Added to the number of a slot that its sender keeps."""
_FREE, _TAKEN = 0, 1

Peer = TypeVar("Peer", int, bytes)


class Layout(NamedTuple):
    """A segment: a head, the flags of both directions, a byte each, and from the next page on
    the slots of both.

    Attributes:
        head_bytes: bytes of the head.
        slots: slots for each direction.
        slot_bytes: bytes of a slot.
    """

    head_bytes: int
    slots: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of the segment."""
        return self.first_slot(2)

    def first_flag(self, sender: int) -> int:
        """Return the offset of a sender's flags."""
        return self.head_bytes + sender * self.slots

    def first_slot(self, sender: int) -> int:
        """Return the offset of a sender's slots."""
        return whole_pages(self.first_flag(2)) + sender * self.slots * self.slot_bytes


class Segment:
    """One end of a segment.

    Args:
        memory: the segment; a slot's pages are touched when it is first used.
        layout: of the memory.
        sender: which of the two this end is, 0 or 1.
    """

    def __init__(self, memory: mmap.mmap, layout: Layout, *, sender: int) -> None:
        self._memory = memory
        self._layout = layout
        self._own_flags, self._own_slots = layout.first_flag(sender), layout.first_slot(sender)
        self._flags, self._slots = layout.first_flag(1 - sender), layout.first_slot(1 - sender)
        self._in_use: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        """Arrays over slots, by the offset of their flags."""
        self._kept: dict[int, int] = {}
        """The slots that this end keeps, by the addresses of their arrays."""

    def write(self, frames: Frames) -> tuple[Frames, list[int]]:
        """Write a packet's large frames to slots.

        Returns:
            What to send in the packet's place, a frame that says where each of its frames is; and
            the slots that were taken: for `withdraw`. The packet itself where not all large frames
            have one.
        """
        entries = [_COUNT.pack(_MARKER, len(frames))]
        here: list[Buffer] = []
        taken: list[int] = []
        for frame in frames:
            size = memoryview(frame).nbytes
            slot: int | None = _HERE
            if size < LEAST_BYTES:
                here.append(frame)
            elif (slot := self._place(frame, size, taken)) is None:
                self.withdraw(taken)
                return frames, []
            entries.append(_ENTRY.pack(slot, size))
        return [b"".join((*entries, *here))], taken

    def _place(self, frame: Buffer, size: int, taken: list[int]) -> int | None:
        """Return the slot that a frame is in, or is copied to; None where there is none."""
        array = np.frombuffer(frame, np.uint8)
        kept = self._kept.get(array.ctypes.data)
        if kept is not None:
            return kept | _KEPT
        slot = self._take() if size <= self._layout.slot_bytes else None
        if slot is not None:
            taken.append(slot)
            start = self._own_slots + slot * self._layout.slot_bytes
            np.copyto(np.frombuffer(self._memory, np.uint8, size, start), array)
        return slot

    def _take(self) -> int | None:
        """Take a free slot for an array to be sent, if there is one."""
        flag = self._memory.find(b"\0", self._own_flags, self._own_flags + self._layout.slots)
        if flag < 0:
            return None
        self._memory[flag] = _TAKEN
        return flag - self._own_flags

    def allocate(self, size: int) -> NDArray[np.uint8] | None:
        """Keep a slot: return an array of so many bytes that `write` sends without a copy; None
        where no slot is free, or the array is too small or too large.
        """
        fits = LEAST_BYTES <= size <= self._layout.slot_bytes
        slot = self._take() if fits else None
        if slot is None:
            return None
        flag, start = self._own_flags + slot, self._own_slots + slot * self._layout.slot_bytes
        array = np.frombuffer(self._array(flag, start, size, self._free_kept), np.uint8)
        self._kept[array.ctypes.data] = slot
        return array

    def withdraw(self, taken: Sequence[int]) -> None:
        """Free the slots of a packet that was not sent."""
        for slot in taken:
            self._memory[self._own_flags + slot] = _FREE

    def read(self, frames: Frames) -> Frames:
        """Return the packet that the other end gave to `write`; large frames are views of their
        slots.

        Raises:
            RemoteProtocolError: the packet names a frame, a slot or a size that cannot be.
        """
        if len(frames) != 1 or not len(frames[0]) or memoryview(frames[0])[0] != _MARKER:
            return frames
        packet = memoryview(frames[0])
        count = _COUNT.unpack_from(packet)[1] if len(packet) >= _COUNT.size else len(packet)
        at = _COUNT.size + count * _ENTRY.size
        if at > len(packet):
            raise RemoteProtocolError("a list of arrays in shared memory is cut short")
        found: list[Buffer] = []
        for named, size in _ENTRY.iter_unpack(packet[_COUNT.size : at]):
            if named == _HERE:
                found.append(packet[at : at + size])
                at += size
            else:
                found.append(self._view(named & ~_KEPT, size, is_kept=bool(named & _KEPT)))
        if at != len(packet):
            raise RemoteProtocolError(f"a packet of {len(packet)} bytes ends at {at}")
        return found

    def _view(self, slot: int, size: int, *, is_kept: bool) -> Buffer:
        if slot >= self._layout.slots or not LEAST_BYTES <= size <= self._layout.slot_bytes:
            raise RemoteProtocolError(f"no array of {size} bytes is in slot {slot}")
        start = self._slots + slot * self._layout.slot_bytes
        if is_kept:
            return self._array(self._flags + slot, start, size, None).toreadonly()
        return self._array(self._flags + slot, start, size, self._free)

    def _array(
        self, flag: int, start: int, size: int, free: Callable[[int], None] | None
    ) -> memoryview:
        """Return the bytes of a slot; call `free` with the flag once nothing refers to them."""
        array = (ctypes.c_ubyte * size).from_buffer(self._memory, start)
        if free is not None:
            self._in_use[flag] = weakref.ref(array, lambda _: free(flag))
        return memoryview(array)

    def _free(self, flag: int) -> None:
        self._memory[flag] = _FREE

    def _free_kept(self, flag: int) -> None:
        slot = flag - self._own_flags
        self._kept = {at: kept for at, kept in self._kept.items() if kept != slot}
        self._memory[flag] = _FREE


class SharedMemory(Generic[Peer]):
    """The peers that this end shares memory with. Only the thread that owns the sockets uses it."""

    def __init__(self) -> None:
        self._writing: dict[Peer, Segment] = {}
        self._reading: dict[Peer, Segment] = {}

    def send(self, peer: Peer, frames: Frames, send: Callable[[Peer, Frames], bool]) -> bool:
        """Send a packet by `send`, without the large arrays that have a slot; returns whether it
        was taken.
        """
        segment = self._writing.get(peer)
        if segment is None:
            return send(peer, frames)
        rest, slots = segment.write(frames)
        taken = send(peer, rest)
        if not taken:
            segment.withdraw(slots)
        return taken

    def reaches(self, peer: Peer) -> bool:
        """Return whether a peer is on this host, and has opened the memory."""
        return peer in self._writing

    def receive(self, peer: Peer, frames: Frames) -> Frames:
        """Return a packet as it was before `send`.

        Raises:
            RemoteProtocolError: see `Segment.read`.
        """
        segment = self._reading.get(peer)
        return frames if segment is None else segment.read(frames)


class WorkerSharedMemory(SharedMemory[int]):
    """A worker's end: the shards, by index.

    Args:
        addresses: of all shards, `tcp://host:port`; none at all, and nothing is shared.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__()
        self._addresses = addresses
        self._files: dict[int, int] = {}

    def offers(self, chunks_on: Callable[[int], Sequence[Chunk]]) -> dict[int, MemoryOffer]:
        """Make memory for each shard of this host that holds large chunks, where the system has
        such memory.
        """
        found: dict[int, MemoryOffer] = {}
        for shard, address in enumerate(self._addresses):
            sizes = [4 * chunk.size for chunk in chunks_on(shard) if 4 * chunk.size >= LEAST_BYTES]
            if not sizes or not is_local(address):
                continue
            slots, slot_bytes = 2 * len(sizes) + SPARE_SLOTS, whole_pages(max(sizes))
            layout, nonce = Layout(NONCE_BYTES, slots, slot_bytes), new_nonce()
            if (made := new_memory(layout.total_bytes, nonce)) is not None:
                self._files[shard], memory = made
                self._reading[shard] = Segment(memory, layout, sender=_WORKER)
                found[shard] = MemoryOffer(os.getpid(), made[0], nonce, slots, slot_bytes)
        return found

    def answered(self, shard: int, answer: MemoryAnswer) -> None:
        """Use the memory that a shard has opened; let go of memory that it has not.

        Raises:
            RemoteProtocolError: it was offered none.
        """
        file = self._files.pop(shard, None)
        if file is None:
            raise RemoteProtocolError(f"shard {shard} answers an offer of memory that was not made")
        os.close(file)
        if answer.opened:
            self._writing[shard] = self._reading[shard]
        else:
            del self._reading[shard]

    def close(self) -> None:
        """Let go of memory whose offer was not answered."""
        while self._files:
            os.close(self._files.popitem()[1])


class ShardSharedMemory(SharedMemory[bytes]):
    """A shard's end: the workers, by their names in the transport."""

    def allocate(self, size: int, peers: Collection[bytes]) -> Tensor | None:
        """Return memory for so many float32 that `send` passes on without a copy to one of these
        workers, if there is some.
        """
        segments = (self._writing[peer] for peer in peers if peer in self._writing)
        found = (segment.allocate(4 * size) for segment in segments)
        array = next((array for array in found if array is not None), None)
        return None if array is None else torch.from_numpy(array.view(np.float32))

    def accept(self, peer: bytes, offer: MemoryOffer) -> MemoryAnswer:
        """Open the memory that a worker offers.

        Raises:
            RemoteProtocolError: it has offered some before.
        """
        if peer in self._reading:
            raise RemoteProtocolError("memory is offered once")
        layout = Layout(NONCE_BYTES, offer.slots, offer.slot_bytes)
        memory = open_memory(offer.process, offer.file, layout.total_bytes, offer.nonce)
        if memory is None:
            return MemoryAnswer(opened=False)
        self._writing[peer] = self._reading[peer] = Segment(memory, layout, sender=_SHARD)
        return MemoryAnswer(opened=True)


def is_local(address: str) -> bool:
    """Return whether an address, `tcp://host:port`, is one of this host's own:
    whether this process could listen there.
    """
    parts = urlsplit(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            parts.hostname, 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except (OSError, ValueError):
        return False
    return True


def new_nonce() -> bytes:
    """Return what memory begins with, so that it is not taken for different memory."""
    return secrets.token_bytes(NONCE_BYTES)


def new_memory(size: int, nonce: bytes = b"") -> tuple[int, mmap.mmap] | None:
    """Make memory without a name that begins with a nonce, and is zero besides. A page of it is
    taken when it is first written to.

    Returns:
        Its file, to be closed, and itself; None where the system has no such memory, or not so
        much.
    """
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.ExitStack() as failed, contextlib.suppress(OSError):
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failed.callback(os.close, file)
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        memory = mmap.mmap(file, size)
        memory[: len(nonce)] = nonce
        failed.pop_all()
        return file, memory
    return None


def open_memory(
    process: int, file: int, size: int, nonce: Buffer | None = None
) -> mmap.mmap | None:
    """Open what `new_memory` made in another process of this host and user;
    None where there is nothing of that kind, or it does not begin with the nonce.
    """
    link = f"/proc/{process}/fd/{file}"
    try:
        if not os.readlink(link).startswith(f"/memfd:{_NAME}"):
            return None
        opened = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status, seals = os.fstat(opened), _seals()
        is_ours = status.st_uid == os.geteuid() and status.st_size == size
        if not is_ours or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & seals != seals:
            return None
        memory = mmap.mmap(opened, size)
        is_meant = nonce is None or hmac.compare_digest(memory[:NONCE_BYTES], nonce)
        return memory if is_meant else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)


def whole_pages(size: int) -> int:
    """Return the least multiple of a page that holds so many bytes."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
