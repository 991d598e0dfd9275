"""`randomk:F`: a part F of the elements, at positions that sender and receiver draw alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps_server.codecs.base import SEGMENT_ELEMENTS, Array, Encoded, Key
from ps_server.codecs.segments import SegmentCodec, add_at, taken


@dataclass(frozen=True)
class RandomK(SegmentCodec):
    """The elements at positions that follow from the key."""

    name = "randomk"

    def size(self, elements: int) -> int:
        return 4 * self.count(elements)

    def encode(self, exact: Array, out: Encoded, key: Key) -> None:
        values = out.view("<f4")
        for rows, at, sent, own in self.slices(exact, key):
            values[at] = taken(rows, drawn(rows.shape, sent, own))

    def add(self, out: Array, encoded: Encoded, key: Key, *, sign: int = 1) -> None:
        values = encoded.view("<f4")
        for rows, at, sent, own in self.slices(out, key):
            add_at(rows, drawn(rows.shape, sent, own), values[at], sign)


def drawn(shape: tuple[int, ...], sent: int, key: Key) -> NDArray[np.int64]:
    """Return positions in increasing order for each segment of a chunk, by a generator without a
    state.

    Args:
        shape: number of segments, and their length; one position comes from each of `sent` equal
            parts of a segment.
        sent: positions for each segment.
        key: of the first segment.
    """
    segments, length = shape
    at = edges(length, sent)
    first = (np.arange(segments) + key.segment) * SEGMENT_ELEMENTS
    counters = (first[:, None] + np.arange(sent)).astype(np.uint64)
    hashed = _mixed(counters + np.uint64(state_of(key.table, key.clock)))
    return (at[:-1] + hashed % (at[1:] - at[:-1])).astype(np.int64)


def edges(length: int, sent: int) -> NDArray[np.uint64]:
    """Return where the equal parts of a segment begin, and its end."""
    return np.arange(sent + 1, dtype=np.uint64) * np.uint64(length) // np.uint64(sent)


def state_of(table: int, clock: int) -> int:
    """Return 64 bits to which each counter is added before it is mixed."""
    state = _mixed(np.full(1, table, np.uint64))
    return int(_mixed(state + np.uint64(clock))[0])


STEP = 0x9E3779B97F4A7C15
MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of splitmix64 (Steele et al., OOPSLA 2014)."""


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(STEP)
    for shift, factor in MIXES:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(31))
