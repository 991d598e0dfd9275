"""Batch memory that is used again, and never while somebody can still see it.

Law: a buffer comes back only when the last tensor on it is gone: whoever keeps a batch (a saved activation, a
sufficient factor on its way to a peer) keeps its memory, and needs to know nothing of this pool.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class BufferPool:
    """Float32 arrays of one shape. Thread-safe."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._free: deque[npt.NDArray[np.float32]] = deque()

    def take(self) -> npt.NDArray[np.float32]:
        """Return an array with arbitrary contents; its memory returns to the pool when the array has died.

        A tensor made of it by `torch.from_numpy` keeps it alive.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._shape, np.float32)
        lent = buffer[...]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent
