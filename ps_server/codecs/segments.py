"""Codecs that send some elements of each segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps_server.codecs.base import SEGMENT_ELEMENTS, Array, Codec, Encoded, Key
from ps_server.errors import SpecError

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
