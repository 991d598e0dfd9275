"""Memory in which a worker passes large payloads to workers of its host: each is copied once,
whatever the number of its receivers, and read where it is.

A block is a memory without a name: a page of flags, a byte for each receiver of a payload, then the
payload. Its sender keeps it for later payloads.

Laws:
* A flag has one writer at a time. The sender sets it with the payload (`_SENT`). The receiver's
  connections note that they have the block open (`_OPEN`), and clear it once nothing refers to the
  payload any more (`_FREE`).
* A sender writes to a block only while all its flags are clear, and leaves only once no flag is
  `_SENT`: the memory lives as long as any process has it open.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import numpy as np

from ps_server import RemoteProtocolError, TransportError
from ps_server.shared_memory import PAGE_BYTES, new_memory, open_memory, whole_pages
from ps_server.transport.base import Buffer

LEAST_BYTES = 32 * 1024
"""Payloads of fewer bytes travel in their message."""
_FREE, _SENT, _OPEN = 0, 1, 2
_ALL_FREE = bytes(PAGE_BYTES)


class Place(NamedTuple):
    """Where a payload is, as its message says.

    Attributes:
        process: the sender's id.
        file: its descriptor of the block.
        block_bytes: of the block.
        payload_bytes: of the payload.
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
        # AttributeError: a system without memfd
        with contextlib.suppress(OSError, AttributeError):
            file, self._own[file] = new_memory(PAGE_BYTES + whole_pages(size))
            return file, self._own[file]
        return None

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
            raise RemoteProtocolError("no payload is at this place in shared memory")
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
