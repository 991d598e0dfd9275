"""A pool of reusable batch buffers.

Law: a buffer returns to the pool only when the last array or tensor on it has been freed. Code that
keeps a batch (as a saved activation, or a sufficient factor that is being sent) keeps its memory
without knowing the pool.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class BufferPool:
    """A pool of float32 arrays of one shape. Thread-safe."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._free: deque[npt.NDArray[np.float32]] = deque()

    def take(self) -> npt.NDArray[np.float32]:
        """Return an uninitialized array. Its memory returns to the pool when the array is freed.

        A tensor that `torch.from_numpy` makes of it keeps it alive.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._shape, np.float32)
        lent = buffer[...]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent
