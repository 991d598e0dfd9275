"""Codecs that send some elements of each segment: the largest ones with their positions, or those
at positions that sender and receiver draw alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps_server.codecs.base import SEGMENT_ELEMENTS, Array, Codec, Encoded, Key, aligned
from ps_server.errors import RemoteProtocolError, SpecError

CPU = torch.device("cpu")
MAX_FRACTION = 0.5
"""Largest part of the elements that is sent: an element costs more than a float32."""


@dataclass(frozen=True)
class SegmentCodec(Codec):
    """A codec of some elements, which its chooser chooses; a subclass adds them, in `add`.

    Args:
        fraction: the part of the elements that is sent; above 0, at most 0.5.
    """

    chooser: ClassVar[type[Largest | Drawn]]
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
            chosen = Largest(rows.shape, sent, key)(torch.from_numpy(rows), key.clock)
            largest = chosen.numpy()
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


class Largest:
    """Chooses the largest magnitudes of each row, NaN above all; of equal ones the lower positions.

    Args:
        shape: number of segments, which are the rows, and their length.
        sent: positions for each segment.
        key: of the first segment.
        device: of the elements.
    """

    def __init__(
        self, shape: tuple[int, ...], sent: int, key: Key, device: torch.device = CPU
    ) -> None:
        self._sent = sent
        self._positions = torch.arange(shape[1]).to(device)

    def __call__(self, rows: Tensor, clock: int) -> Tensor:
        """Return positions in each row, in increasing order."""
        magnitudes = rows.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
        order = magnitudes * SEGMENT_ELEMENTS - self._positions  # no two are equal
        return order.topk(self._sent, dim=1, sorted=False).indices.sort(dim=1).values


class Drawn:
    """Draws positions by a generator without a state, with 64 bits in signed numbers: one comes from
    each of `sent` equal parts of a segment.

    Args:
        shape, sent, key, device: see `Largest`.
    """

    def __init__(
        self, shape: tuple[int, ...], sent: int, key: Key, device: torch.device = CPU
    ) -> None:
        segments, length = shape
        self._table = key.table
        at = np.arange(sent + 1) * length // sent
        counters = (key.segment + np.arange(segments))[:, None] * SEGMENT_ELEMENTS + np.arange(sent)
        self._starts = torch.from_numpy(at[:-1].copy()).to(device)
        self._widths = torch.from_numpy(np.diff(at)).to(device)
        self._counters = torch.from_numpy(counters).to(device)
        self._carries = torch.from_numpy(2**32 % np.diff(at)).to(device)

    def __call__(self, rows: Tensor | None, clock: int) -> Tensor:
        """Return positions in each row, in increasing order."""
        mixed = self._counters + _signed(_mixed(_mixed(self._table) + clock) + STEP)
        for shift, factor in MIXES:
            mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
        mixed = mixed ^ _shifted(mixed, 31)
        high, low = _shifted(mixed, 32) % self._widths, (mixed & 0xFFFFFFFF) % self._widths
        return self._starts + (high * self._carries + low) % self._widths


TopK.chooser, RandomK.chooser = Largest, Drawn


def drawn(shape: tuple[int, ...], sent: int, key: Key) -> NDArray[np.int64]:
    """Return the positions that `Drawn` draws."""
    return Drawn(shape, sent, key)(None, key.clock).numpy()


STEP = 0x9E3779B97F4A7C15
MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of splitmix64 (Steele et al., OOPSLA 2014)."""


def _mixed(z: int) -> int:
    z = (z + STEP) % 2**64
    for shift, factor in MIXES:
        z = (z ^ (z >> shift)) * factor % 2**64
    return z ^ (z >> 31)


def _signed(bits: int) -> int:
    """Return the signed number with these 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift 64 bits to the right, with zeros from the left."""
    found: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return found
