"""Memory for what is sealed, used again once ZeroMQ has sent it: new memory costs a third more,
because the kernel clears it.
"""

from __future__ import annotations

from collections import deque

import zmq

MOST_KEPT_BYTES = 32 * 2**20
"""Most memory that waits to be used again."""
_STEP = 64 * 1024


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
