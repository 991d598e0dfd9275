"""Lanes: how arrays get from one process to another of the same machine in memory that both have.

A lane is a row of places for one array each, with a mark for each place. The sender writes an array to a free place and sends the
place's number where the array would have stood in a packet; the receiver works on the array where it lies, and the place is free
again when nothing refers to it.

Laws:

* Nothing waits for a place: where none is free the array stays in its packet.
* A place has one writer at a time. Its mark is set by the lane's sender and cleared by whoever has the place: the receiver, or the
  sender again when the packet was not sent.
* What comes out of a place is a peer's word like any frame. Whoever sends nonsense harms no memory but the lanes' own.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ps_server.errors import RemoteProtocolError
from ps_server.transport.base import Buffer, Frames

LEAST_BYTES = 64 * 1024
"""Arrays of fewer bytes cost as much either way."""
PAGE_BYTES = 4096
_MARKER = 0xC1
"""A first byte that msgpack never writes, so that no header looks like a list of places."""
_ENTRY = struct.Struct("<III")
"""Number of the frame, place, bytes."""
_FREE, _TAKEN = 0, 1


class Layout(NamedTuple):
    """Two lanes in one memory: a head, the marks of both, a byte each, and from the next page on the places of both."""

    head_bytes: int
    places: int
    place_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of the memory."""
        return self.first_place(2)

    def first_mark(self, lane: int) -> int:
        """Where a lane's marks begin."""
        return self.head_bytes + lane * self.places

    def first_place(self, lane: int) -> int:
        """Where a lane's places begin."""
        return whole_pages(self.first_mark(2)) + lane * self.places * self.place_bytes


class Lanes:
    """One end of two lanes.

    Args:
        memory: of both; a place's pages are touched when it is first used.
        layout: of the memory.
        sends: the lane that this end sends on, 0 or 1; it receives on the other.
    """

    def __init__(self, memory: mmap.mmap, layout: Layout, *, sends: int) -> None:
        self._memory = memory
        self._layout = layout
        self._own_marks, self._own_places = layout.first_mark(sends), layout.first_place(sends)
        self._marks, self._places = layout.first_mark(1 - sends), layout.first_place(1 - sends)
        self._borrowed: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}

    def lend(self, frames: Frames) -> tuple[Frames, list[int]]:
        """Write a packet's large frames to places.

        Returns:
            What to send in the packet's place, and the places that it speaks of: for `take_back`.
        """
        entries: list[bytes] = []
        taken: list[int] = []
        rest = list(frames)
        for number, frame in enumerate(frames):
            size = memoryview(frame).nbytes
            if not LEAST_BYTES <= size <= self._layout.place_bytes:
                continue
            place = self._memory.find(b"\0", self._own_marks, self._own_marks + self._layout.places)
            if place < 0:
                break
            place -= self._own_marks
            self._memory[self._own_marks + place] = _TAKEN
            start = self._own_places + place * self._layout.place_bytes
            np.copyto(np.frombuffer(self._memory, np.uint8, size, start), np.frombuffer(frame, np.uint8))
            taken.append(place)
            entries.append(_ENTRY.pack(number, place, size))
            rest[number] = b""
        return ([bytes([_MARKER]) + b"".join(entries), *rest], taken) if taken else (frames, taken)

    def take_back(self, taken: Sequence[int]) -> None:
        """What `lend` gave was not sent."""
        for place in taken:
            self._memory[self._own_marks + place] = _FREE

    def borrow(self, frames: Frames) -> Frames:
        """What the other end gave to `lend`; large frames are views of their places.

        Raises:
            RemoteProtocolError: the packet speaks of what there is not.
        """
        if not frames or not len(frames[0]) or memoryview(frames[0])[0] != _MARKER:
            return frames
        entries, rest = memoryview(frames[0])[1:], list(frames[1:])
        if len(entries) % _ENTRY.size:
            raise RemoteProtocolError("a list of lent arrays is cut short")
        for number, place, size in _ENTRY.iter_unpack(entries):
            fits = place < self._layout.places and LEAST_BYTES <= size <= self._layout.place_bytes
            if not fits or number >= len(rest) or len(rest[number]):
                raise RemoteProtocolError(f"frame {number} is not an array of {size} bytes at place {place}")
            rest[number] = self._borrow(place, size)
        return rest

    def _borrow(self, place: int, size: int) -> Buffer:
        array = (ctypes.c_ubyte * size).from_buffer(
            self._memory, self._places + place * self._layout.place_bytes
        )
        self._borrowed[place] = weakref.ref(array, lambda _: self._give_back(place))
        return memoryview(array)

    def _give_back(self, place: int) -> None:
        self._memory[self._marks + place] = _FREE


def whole_pages(size: int) -> int:
    """The least multiple of a page that holds so many bytes."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
