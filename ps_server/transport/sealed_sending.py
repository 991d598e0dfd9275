"""Sends sealed packets over ZeroMQ's sockets, from memory that is used again once it was sent: new
memory costs a third more, because it is cleared first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import zmq

from ps_server.transport.base import Frames

if TYPE_CHECKING:
    from ps_server.transport.sealing import Sealer

MOST_KEPT_BYTES = 32 * 2**20
"""Most memory that waits to be used again."""
COPIED_BYTES = 512 * 1024
"""A smaller part is copied: pyzmq wakes a thread for each that is not, once it was sent."""
_STEP = 64 * 1024
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


class SentMemory:
    """Blocks of memory, by size."""

    def __init__(self) -> None:
        self._blocks: dict[int, deque[tuple[bytearray, zmq.MessageTracker | None]]] = {}
        self._kept_bytes = 0

    def take(self, size: int) -> memoryview:
        """Return so many bytes, with any content."""
        capacity = -(-size // _STEP) * _STEP
        kept = self._blocks.get(capacity)
        if kept and (kept[0][1] is None or kept[0][1].done):
            block, _ = kept.popleft()
            self._kept_bytes -= capacity
        else:
            block = bytearray(capacity)
        return memoryview(block)[:size]

    def give_back(self, taken: memoryview, tracker: zmq.MessageTracker | None) -> None:
        """Use memory again once it was sent.

        Args:
            taken: what `take` returned.
            tracker: tells when that is; None: it was copied.
        """
        block = taken.obj
        assert isinstance(block, bytearray)
        if self._kept_bytes + len(block) > MOST_KEPT_BYTES:  # other sizes than before
            self._blocks.clear()
            self._kept_bytes = 0
        self._blocks.setdefault(len(block), deque()).append((block, tracker))
        self._kept_bytes += len(block)


def send_sealed(
    socket: zmq.Socket[bytes],
    sealer: Sealer,
    frames: Frames,
    memory: SentMemory,
    *,
    tracked: bool = False,
) -> zmq.MessageTracker | None:
    """Send a sealed packet; returns what tells when its last part has left, where `tracked`.

    Raises:
        Again: too many messages wait; nothing was sealed.
    """
    socket.send(sealer.number, _MORE)  # ZeroMQ takes all parts of a message, or not the first
    *large, lead = sealer.seal(frames, memory.take)
    for part in large:
        _send_part(socket, part, _MORE, memory)
    return _send_part(socket, lead, _NOBLOCK, memory, tracked=tracked)


def _send_part(
    socket: zmq.Socket[bytes],
    part: memoryview,
    flags: int,
    memory: SentMemory,
    *,
    tracked: bool = False,
) -> zmq.MessageTracker | None:
    if part.nbytes < COPIED_BYTES and not tracked:
        socket.send(part, flags, copy=True)
        memory.give_back(part, None)
        return None
    frame = zmq.Frame(part, track=True, copy=False)
    socket.send(frame, flags, copy=False)
    tracker: zmq.MessageTracker = frame.tracker
    memory.give_back(part, tracker)
    return tracker
