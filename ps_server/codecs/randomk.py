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
    edges = np.arange(sent + 1, dtype=np.uint64) * np.uint64(length) // np.uint64(sent)
    first = (np.arange(segments) + key.segment) * SEGMENT_ELEMENTS
    counters = (first[:, None] + np.arange(sent)).astype(np.uint64)
    return (edges[:-1] + _hashed(counters, key) % (edges[1:] - edges[:-1])).astype(np.int64)


def _hashed(counters: NDArray[np.uint64], key: Key) -> NDArray[np.uint64]:
    """Return 64 bits for each counter, which follow from it, table and clock
    (splitmix64: Steele et al., OOPSLA 2014).
    """
    state = _mixed(np.full(1, key.table, np.uint64))
    state = _mixed(state + np.uint64(key.clock))
    return _mixed(state + counters)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
