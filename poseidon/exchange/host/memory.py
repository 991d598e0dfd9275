"""The memory that the workers of a host share: what each contributes to the pieces of others, and
the values of all pieces.

The memory has no name: it is a file that exists only as an open descriptor, which the processes
pass over their connections, so nothing of it is left when they have ended, however they ended.

Layout, in float32: each piece's value, then a place for each part that a worker other than its
owner contributes. Each begins at a cache line. Law: a place has one writer at a time; the messages
of the workers say which.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.exchange.device import HOST, Device
from ps_server import TransportError

FLOAT_BYTES = 4
LINE_FLOATS = 16


class HostMemory:
    """The views of one worker of a host.

    Args:
        sizes: elements of each piece.
        parts: for each piece the number of parts that each worker contributes, by local rank; 0 for
            its owner, and where it travels as factors.
        file: the memory's descriptor, which this takes over; local rank 0 makes it with `new_file`.
        device: of the tensors, which copies to and from the memory.

    Attributes:
        values: of each piece.

    Raises:
        TransportError: there is not so much memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        parts: Sequence[Sequence[int]],
        file: int,
        device: Device = HOST,
    ) -> None:
        lines = [-(-size // LINE_FLOATS) * LINE_FLOATS for size in sizes]
        floats = sum(own * (1 + sum(counts)) for own, counts in zip(lines, parts, strict=True))
        length = max(floats, 1) * FLOAT_BYTES
        try:
            if os.fstat(file).st_size < length:
                os.ftruncate(file, length)
            memory = torch.frombuffer(mmap.mmap(file, length), dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"the workers of this machine cannot share {length / 2**20:.0f} MiB of memory: "
                f"{getattr(error, 'strerror', None) or error}; expected so much free memory, or "
                "fewer workers on this machine"
            ) from error
        finally:
            os.close(file)
        self._memory: Tensor | None = memory
        self._device = device
        device.pin(memory)
        start = 0

        def take(piece: int) -> Tensor:
            nonlocal start
            view = memory[start : start + sizes[piece]]
            start += lines[piece]
            return view

        self.values = [take(piece) for piece in range(len(sizes))]
        self._parts = [
            [[take(piece) for _ in range(count)] for count in counts]
            for piece, counts in enumerate(parts)
        ]

    def parts(self, piece: int, worker: int) -> list[Tensor]:
        """Return the places of a worker's parts of a piece."""
        return self._parts[piece][worker]

    def close(self) -> None:
        """Free the memory: it goes with the last of its views. Safe to call twice."""
        if self._memory is not None:
            self._device.synchronize()
            self._device.unpin(self._memory)
        self.values, self._parts, self._memory = [], [], None


def new_file() -> int:
    """Make an empty file without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("poseidon", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
