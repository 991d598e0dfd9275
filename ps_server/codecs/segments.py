"""Codecs that send some elements of each segment: the largest ones with their positions, or those
at positions that sender and receiver draw alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps_server.codecs.base import SEGMENT_ELEMENTS, Array, Codec, Encoded, Key, aligned
from ps_server.errors import RemoteProtocolError, SpecError

MAX_FRACTION = 0.5
"""Largest part of the elements that is sent: an element costs more than a float32."""


@dataclass(frozen=True)
class SegmentCodec(Codec):
    """A codec of some elements; a subclass chooses them, in `encode`, and adds them, in `add`.

    Args:
        fraction: the part of the elements that is sent; above 0, at most 0.5.
    """

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= MAX_FRACTION:
            raise SpecError(
                f"{self.name}:{self.fraction:g} is not a codec; expected a fraction above 0 "
                f"and at most {MAX_FRACTION}"
            )

    def sent(self, elements: int) -> tuple[int, int]:
        return self._sent_of(SEGMENT_ELEMENTS), self._sent_of(elements % SEGMENT_ELEMENTS)

    def decode(self, encoded: Encoded, out: Array, key: Key) -> None:
        out.fill(0.0)
        self.add(out, encoded, key)

    def parts(self, elements: int) -> list[tuple[int, int, int]]:
        """Return (number of segments, their length, elements that are sent of each): the whole
        ones, and a shorter last one.
        """
        whole, rest = divmod(elements, SEGMENT_ELEMENTS)
        return [
            (rows, length, self._sent_of(length))
            for rows, length in ((whole, SEGMENT_ELEMENTS), (1, rest))
            if rows and length
        ]

    def count(self, elements: int) -> int:
        """Return how many elements are sent."""
        return sum(rows * sent for rows, _, sent in self.parts(elements))

    def slices(self, flat: Array, key: Key) -> Iterator[tuple[Array, slice, int, Key]]:
        """Yield a view of each part as rows, a segment each, where its elements are among all that
        are sent, the number that is sent of each row, and the key of the first row.
        """
        first = start = 0
        for rows, length, sent in self.parts(flat.size):
            own = flat[first : first + rows * length].reshape(rows, length)
            segment = key.segment + first // SEGMENT_ELEMENTS
            yield own, slice(start, start + rows * sent), sent, key._replace(segment=segment)
            first += rows * length
            start += rows * sent

    def _sent_of(self, length: int) -> int:
        return max(1, round(length * self.fraction))


def taken(rows: Array, positions: NDArray[np.int64]) -> Array:
    """Return the elements at positions of each row, flat."""
    return np.take_along_axis(rows, positions, axis=1).reshape(-1)


def add_at(rows: Array, positions: NDArray[np.int64], values: Array, sign: int) -> None:
    """Add values at positions of each row, no two of which are equal."""
    flat = rows.reshape(-1)
    at = (positions + np.arange(len(rows))[:, None] * rows.shape[1]).reshape(-1)
    if sign > 0:
        flat[at] += values
    else:
        flat[at] -= values


@dataclass(frozen=True)
class TopK(SegmentCodec):
    """`topk:F`: positions of the largest magnitudes within their segments, in increasing order, of
    16 bits; then the elements.
    """

    name = "topk"

    def size(self, elements: int) -> int:
        count = self.count(elements)
        return aligned(2 * count) + 4 * count

    def encode(self, exact: Array, out: Encoded, key: Key) -> None:
        positions, values = self._split(out, exact.size)
        out[positions.nbytes : out.size - values.nbytes] = 0
        for rows, at, sent, _ in self.slices(exact, key):
            largest = _largest(rows, sent)
            positions[at] = largest.reshape(-1)
            values[at] = taken(rows, largest)

    def check(self, encoded: Encoded, elements: int) -> None:
        positions, _ = self._split(encoded, elements)
        start = 0
        for rows, length, sent in self.parts(elements):
            own = positions[start : start + rows * sent].reshape(rows, sent)
            if bool((own[:, -1] >= length).any()) or bool((own[:, 1:] <= own[:, :-1]).any()):
                raise RemoteProtocolError(
                    "the positions of the largest elements do not increase within their segment"
                )
            start += rows * sent

    def add(self, out: Array, encoded: Encoded, key: Key, *, sign: int = 1) -> None:
        positions, values = self._split(encoded, out.size)
        for rows, at, sent, _ in self.slices(out, key):
            own = positions[at].reshape(len(rows), sent).astype(np.int64)
            add_at(rows, own, values[at], sign)

    def _split(self, encoded: Encoded, elements: int) -> tuple[NDArray[np.uint16], Array]:
        count = self.count(elements)
        return encoded[: 2 * count].view("<u2"), encoded[aligned(2 * count) :].view("<f4")


def _largest(rows: Array, count: int) -> NDArray[np.int64]:
    """Return the positions of each row's largest magnitudes, in order; of equal ones the lower
    positions.
    """
    magnitudes = np.abs(rows).view(np.int32)  # in the order of the numbers, NaN above all
    at = rows.shape[1] - count
    least = np.partition(magnitudes, at, axis=1)[:, at : at + 1]
    chosen = magnitudes >= least
    for row in np.flatnonzero(chosen.sum(axis=1) > count):
        equal = np.flatnonzero(magnitudes[row] == least[row])
        chosen[row, equal[count - int(chosen[row].sum()) :]] = False
    return np.nonzero(chosen)[1].reshape(len(rows), count)


@dataclass(frozen=True)
class RandomK(SegmentCodec):
    """`randomk:F`: the elements at positions that follow from the key."""

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
