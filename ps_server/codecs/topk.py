"""`topk:F`: the part F of the elements that is largest in magnitude, with their positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps_server.codecs.base import Array, Encoded, Key, aligned
from ps_server.codecs.segments import SegmentCodec, add_at, taken
from ps_server.errors import RemoteProtocolError


@dataclass(frozen=True)
class TopK(SegmentCodec):
    """Positions within their segments, in increasing order, of 16 bits; then the elements."""

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
