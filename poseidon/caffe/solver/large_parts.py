"""Sends the large parts of a memory snapshot, such as what codecs hold back and inner histories, from
the workers that own them to the workers that hold the snapshot.

These parts belong to single virtual workers, and each is as large as the tensors.

Law: all workers send the same number of pieces, after the same iterations, so their collections
have one order. A piece is small compared with what an iteration sends, unless the next snapshot is
due soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array
from poseidon.exchange.broadcast import PIECE_BYTES
from poseidon.exchange.cost import ELEMENT_BYTES
from poseidon.exchange.job_control import JobControl
from ps_server import Collection

LEAST_BYTES = 64 * 1024
"""The smallest piece, but for the last one."""


class OwnParts:
    """Copies of the parts of one worker.

    Args:
        live: by name, float32.

    Attributes:
        named: the copies, flat.
        memory: of all of them, one after another.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in live.items()}
        self.memory = np.empty(sum(self._sizes.values()), np.float32)
        self.named = divided(self.memory, self._sizes)
        for name, tensor in live.items():
            torch.from_numpy(self.named[name]).copy_(tensor.detach().reshape(-1))

    def head(self, *, holds: bool) -> bytes:
        """Return what the other workers need to know of them."""
        packed: bytes = msgpack.packb([holds, self._sizes])
        return packed


@dataclass(frozen=True, slots=True)
class Head:
    """What one worker has sent: whether it holds snapshots, and the elements of its parts."""

    holds: bool
    sizes: Mapping[str, int]

    @classmethod
    def unpack(cls, packed: bytes) -> Head:
        """Return what `OwnParts.head` has packed."""
        return cls(*msgpack.unpackb(packed))


class ComingParts:
    """The parts of all workers on their way; nothing where there are none.

    Args:
        heads: of all workers, by rank.
        iterations: until the next snapshot.
    """

    def __init__(
        self,
        own: OwnParts,
        heads: Sequence[Head],
        control: JobControl,
        *,
        rank: int,
        iterations: int,
    ) -> None:
        largest = ELEMENT_BYTES * max(sum(head.sizes.values()) for head in heads)
        self._own = own
        self._heads = heads
        self._control = control
        self._rank = rank
        self._to = frozenset(holder for holder, head in enumerate(heads) if head.holds)
        self._piece = min(PIECE_BYTES, max(LEAST_BYTES, -(-largest // max(1, iterations))))
        self._starts = deque(range(0, largest, self._piece))
        self._under_way: deque[tuple[int, Collection]] = deque()
        self._memory: dict[int, Array] = {}
        if rank in self._to:
            self._memory = {
                other: np.empty(sum(head.sizes.values()), np.float32)
                for other, head in enumerate(heads)
                if other != rank
            }

    def send(self) -> None:
        """Send the next piece, if any is left. All workers call it after the same iteration."""
        if self._starts:
            start = self._starts.popleft()
            piece = self._own.memory.view(np.uint8)[start : start + self._piece].tobytes()
            self._under_way.append((start, self._control.gather(piece, self._to)))

    def poll(self) -> Mapping[str, Array] | None:
        """Return the parts of all workers, or this worker's own if it holds no snapshots, once all
        pieces are sent and have come; None before.
        """
        while self._under_way:
            start, collection = self._under_way[0]
            payloads = collection.poll()
            if payloads is None:
                return None
            self._under_way.popleft()
            self._take(start, payloads)
        return None if self._starts else self._whole()

    def result(self) -> Mapping[str, Array]:
        """Send all pieces that are left, and wait for the pieces of all workers."""
        while self._starts:
            self.send()
        while self._under_way:
            start, collection = self._under_way.popleft()
            self._take(start, collection.result())
        return self._whole()

    def _take(self, start: int, payloads: Sequence[bytes]) -> None:
        for other, memory in self._memory.items():
            piece = np.frombuffer(payloads[other], np.uint8)
            memory.view(np.uint8)[start : start + piece.size] = piece

    def _whole(self) -> Mapping[str, Array]:
        found = dict(self._own.named)
        for other, memory in self._memory.items():
            found |= divided(memory, self._heads[other].sizes)
        return found


def divided(memory: Array, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Return views of consecutive arrays, of so many elements each."""
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = memory[start : start + size]
        start += size
    return found
