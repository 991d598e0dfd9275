"""Lossy codecs: a chunk's gradient or change of value as fewer bytes, and back.

Pure: numbers in, numbers out.

    codec      bytes of n elements                      sent
    int8       n + 4 n / 256                            round(x / scale), scale = largest magnitude of the block / 127
    int4       n / 2 + 4 n / 64                         the same with 7 levels on each side of 0, in smaller blocks
    sign       n / 8 + 4 n / 256                        the sign of x, and the mean magnitude of the block
    topk:f     6 f n                                    the largest magnitudes of each segment, with their positions
    randomk:f  4 f n                                    elements of each segment, one from each of equal parts

A block is 256 elements (64 of int4), a segment 16,384 (the last of a table may be shorter). Chunks
of such tables are cut between segments (`placement.py`), so that bits do not depend on the chunks.

Sources: block scales as in 8-bit optimizers (Dettmers et al., ICLR 2022); sign with a mean:
Karimireddy et al., ICML 2019; top-k: Aji and Heafield, EMNLP 2017; feedback in both directions:
Tang et al. (DoubleSqueeze), ICML 2019.

Laws:

* The encoded size follows from the size of the chunk alone, and is a multiple of 4. What is
  sent of a segment follows from its elements alone.
* What a receiver adds is what the sender subtracts from what it holds back, to the bit. So the sum
  of what was sent and of what is held back is the sum of what was given, up to the rounding of
  float32 sums.
* Bits follow from the numbers alone: no reduction depends on threads, alignment or vector width,
  and of equal magnitudes the one with the lower position is sent. Compiled code
  (`ps_server.native`) has the same bits as the code here, but for the payload of a NaN; it does in
  one pass over memory what takes torch six.
* Encoded bytes are checked before they are used: a position outside its chunk is a
  `RemoteProtocolError`.
* A number that is not finite arrives as one that is not finite: its block's scale is not finite,
  and the block's codes are 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps_server import native
from ps_server.errors import RemoteProtocolError
from ps_server.protocol.messages import Array
from ps_server.protocol.placement import Chunk
from ps_server.protocol.settings import SEGMENT_ELEMENTS, CodecKind, CodecSpec

BLOCK = 256
"""Elements that share a scale; a segment has a whole number of blocks."""
TILE = 64 * 1024
"""Elements that are encoded at a time; a multiple of both sizes of blocks."""
FOUR_BIT_BLOCK = 64
"""Elements that share a scale in `Int4`."""
LEVELS = 127.0
FOUR_BIT_LEVELS = 7.0
SMALLEST_SCALE = 2.0**-126
"""Scales below are 0: float32 has fewer digits there, and processes compute without denormal
numbers.
"""
ALIGNMENT = 4

Encoded = NDArray[np.uint8]


class Key(NamedTuple):
    """The seed of the positions that sender and receiver draw alike: a table in an iteration,
    from one segment on.
    """

    table: int
    segment: int
    clock: int

    @classmethod
    def of(cls, chunk: Chunk, clock: int) -> Key:
        """Return the key of a chunk in an iteration."""
        return cls(chunk.table, chunk.start // SEGMENT_ELEMENTS, clock)


class Codec(ABC):
    """One codec. Encoded arrays have `size(n)` bytes, the others n elements of float32.

    A subclass has the two steps that the four operations are made of. Where there is compiled code,
    it does each operation at once.

    Args:
        library: the compiled code; None: there is none.
    """

    kind: ClassVar[native.Kind]
    """The codec's name in the compiled code."""

    def __init__(self, library: native.Library | None) -> None:
        self._library = library

    @abstractmethod
    def size(self, elements: int) -> int:
        """Return the bytes of so many elements."""

    def check(self, encoded: Encoded, elements: int) -> None:  # noqa: B027 - any bytes of the right number are legal
        """Check bytes of a peer. Their number is right.

        Raises:
            RemoteProtocolError: no encoder makes them.
        """

    def compress(self, left: Array, given: Array, out: Encoded, key: Key) -> None:
        """Write `left` + `given` to `out` as well as the codec can; leave the rest in `left`."""
        if self._library is not None and native.fits(left, given, out):
            self._library.compress(self.kind, left, given, out, self._part(left.size, key))
            return
        np.add(left, given, out=left)
        self._encode(left, out, key)
        self._add(left, out, key, sign=-1)

    def follow(self, own: Array, value: Array, out: Encoded, key: Key) -> None:
        """Write the change from `own` to `value` to `out` as well as the codec can; apply it."""
        if self._library is not None and native.fits(own, value, out):
            self._library.follow(self.kind, own, value, out, self._part(own.size, key))
            return
        self._encode(value - own, out, key)
        self._add(own, out, key, sign=1)

    def add(self, out: Array, encoded: Encoded, key: Key) -> None:
        """Add the encoded numbers to `out`. `check` has passed."""
        if self._library is not None and native.fits(out, encoded):
            self._library.add(self.kind, out, encoded, self._part(out.size, key))
            return
        self._add(out, encoded, key, sign=1)

    def average(self, out: Array, pushes: Sequence[Encoded], key: Key) -> None:
        """Write the mean of what workers have encoded to `out`: 0 + the first + the second ...,
        divided by their number. `check` has passed.
        """
        if self._library is not None and native.fits(out, *pushes):
            self._library.average(self.kind, out, pushes, self._part(out.size, key))
            return
        out.fill(0.0)
        for encoded in pushes:
            self._add(out, encoded, key, sign=1)
        if len(pushes) > 1:
            np.divide(out, np.float32(len(pushes)), out=out)

    def _part(self, elements: int, key: Key) -> native.Part:
        sent, last = self._sent(elements)
        return native.Part(elements, sent, last, key.table, key.segment, key.clock)

    def _sent(self, elements: int) -> tuple[int, int]:
        """Return the elements that are sent of a whole segment, and of a shorter last one, where
        these are not all.
        """
        return 0, 0

    @abstractmethod
    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        """Write `exact` to `out` as well as the codec can."""

    @abstractmethod
    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        """Add the encoded numbers to `out`, or subtract them (sign -1)."""


class Int8(Codec):
    """`CodecKind.INT8`: the scales of all blocks, then one byte for each element."""

    kind = native.Kind.INT8

    def size(self, elements: int) -> int:
        return _aligned(4 * _blocks(elements) + elements)

    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        scales, numbers = _split(out, exact.size, np.int8)
        out[4 * _blocks(exact.size) + exact.size :] = 0
        for blocks, start in _blocks_of(torch.from_numpy(exact)):
            scale, rounded = _rounded(blocks, LEVELS)
            numbers[start : start + blocks.numel()].copy_(rounded.view(-1))
            scales[start // BLOCK : start // BLOCK + len(scale)].copy_(scale)

    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        scales, numbers = _split(encoded, out.size, np.int8)
        for blocks, start in _blocks_of(torch.from_numpy(out)):
            scale = scales[start // BLOCK : start // BLOCK + len(blocks)]
            part = numbers[start : start + blocks.numel()].view(blocks.shape).float()
            blocks.add_(part.mul_(scale[:, None]), alpha=sign)


class Int4(Codec):
    """`CodecKind.INT4`: the scales of all blocks, then 4 bits for each element:
    its number + 8, the lower half first.
    """

    kind = native.Kind.INT4

    def size(self, elements: int) -> int:
        return _aligned(4 * _blocks(elements, FOUR_BIT_BLOCK) + -(-elements // 2))

    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        scales, packed = _split(out, exact.size, np.uint8, FOUR_BIT_BLOCK)
        packed.zero_()
        for blocks, start in _blocks_of(torch.from_numpy(exact), FOUR_BIT_BLOCK):
            scale, rounded = _rounded(blocks, FOUR_BIT_LEVELS)
            numbers = rounded.add_(8.0).to(torch.uint8).view(-1)
            part = packed[start // 2 : -(-(start + blocks.numel()) // 2)]
            # of an odd number the last half byte is 0
            part[: blocks.numel() // 2].copy_(numbers[1::2]).mul_(16)
            part.add_(numbers[::2])
            scales[start // FOUR_BIT_BLOCK : start // FOUR_BIT_BLOCK + len(scale)].copy_(scale)

    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        scales, packed = _split(encoded, out.size, np.uint8, FOUR_BIT_BLOCK)
        for blocks, start in _blocks_of(torch.from_numpy(out), FOUR_BIT_BLOCK):
            part = packed[start // 2 : -(-(start + blocks.numel()) // 2)]
            numbers = torch.stack([part % 16, part // 16], dim=1).view(-1)[: blocks.numel()]
            scale = scales[start // FOUR_BIT_BLOCK : start // FOUR_BIT_BLOCK + len(blocks)]
            blocks.add_(
                numbers.view(blocks.shape).float().sub_(8.0).mul_(scale[:, None]), alpha=sign
            )


class Sign(Codec):
    """`CodecKind.SIGN`: the magnitudes of all blocks, then one bit for each element, 1 below 0,
    lowest bit first.
    """

    kind = native.Kind.SIGN

    def size(self, elements: int) -> int:
        return _aligned(4 * _blocks(elements) + -(-elements // 8))

    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        magnitudes, _ = _split(out, exact.size, np.uint8)
        for blocks, start in _blocks_of(torch.from_numpy(exact)):
            means = _one_nan(_sums(blocks.abs()).div_(blocks.shape[1]))
            magnitudes[start // BLOCK : start // BLOCK + len(means)].copy_(means)
        bits = np.packbits(exact < 0, bitorder="little")
        first = 4 * _blocks(exact.size)
        out[first : first + bits.size] = bits
        out[first + bits.size :] = 0

    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        magnitudes, packed = _split(encoded, out.size, np.uint8)
        for blocks, start in _blocks_of(torch.from_numpy(out)):
            count = blocks.numel()
            bits = np.unpackbits(
                packed[start // 8 : -(-(start + count) // 8)].numpy(),
                count=count,
                bitorder="little",
            )
            signs = torch.from_numpy(bits).view(blocks.shape).float().mul_(-2.0).add_(1.0)
            means = magnitudes[start // BLOCK : start // BLOCK + len(blocks)]
            blocks.add_(signs.mul_(means[:, None]), alpha=sign)


class Sparse(Codec):
    """A codec that sends some elements of each segment.

    Args:
        library: as for `Codec`.
        fraction: the part of the elements that is sent.
    """

    def __init__(self, library: native.Library | None, fraction: float) -> None:
        super().__init__(library)
        self._fraction = fraction

    def _sent(self, elements: int) -> tuple[int, int]:
        return tuple(  # type: ignore[return-value]
            max(1, round(length * self._fraction))
            for length in (SEGMENT_ELEMENTS, elements % SEGMENT_ELEMENTS)
        )


class TopK(Sparse):
    """`CodecKind.TOPK`: positions within their segments, in increasing order, of 16 bits; then
    the elements.
    """

    kind = native.Kind.TOPK

    def size(self, elements: int) -> int:
        count = sum(rows * sent for rows, _, sent in self._parts(elements))
        return _aligned(2 * count) + 4 * count

    def _parts(self, elements: int) -> list[tuple[int, int, int]]:
        return _segments(elements, self._fraction)

    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        positions, values = self._split(out, exact.size)
        out[positions.nbytes : out.size - values.nbytes] = 0
        for part, start, sent in _slices(exact, self._parts(exact.size)):
            largest = _largest(part, sent)
            positions[start : start + largest.size] = largest.reshape(-1)
            values[start : start + largest.size] = np.take_along_axis(
                part, largest, axis=1
            ).reshape(-1)

    def check(self, encoded: Encoded, elements: int) -> None:
        positions, _ = self._split(encoded, elements)
        start = 0
        for rows, length, sent in self._parts(elements):
            own = positions[start : start + rows * sent].reshape(rows, sent)
            if bool((own[:, -1] >= length).any()) or bool((own[:, 1:] <= own[:, :-1]).any()):
                raise RemoteProtocolError(
                    "the positions of the largest elements do not increase within their segment"
                )
            start += rows * sent

    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        positions, values = self._split(encoded, out.size)
        for part, start, sent in _slices(out, self._parts(out.size)):
            stop = start + len(part) * sent
            own = positions[start:stop].reshape(len(part), sent)
            _add_at(part, own.astype(np.int64), values[start:stop], sign)

    def _split(self, encoded: Encoded, elements: int) -> tuple[NDArray[np.uint16], Array]:
        count = sum(rows * sent for rows, _, sent in self._parts(elements))
        return encoded[: 2 * count].view("<u2"), encoded[_aligned(2 * count) :].view("<f4")


class RandomK(Sparse):
    """`CodecKind.RANDOMK`: the elements at positions that follow from the key."""

    kind = native.Kind.RANDOMK

    def size(self, elements: int) -> int:
        return 4 * sum(rows * sent for rows, _, sent in _segments(elements, self._fraction))

    def _encode(self, exact: Array, out: Encoded, key: Key) -> None:
        values = out.view("<f4")
        for part, start, sent in _slices(exact, _segments(exact.size, self._fraction)):
            positions = drawn(part.shape, sent, _later(key, exact, part))
            values[start : start + positions.size] = np.take_along_axis(
                part, positions, axis=1
            ).reshape(-1)

    def _add(self, out: Array, encoded: Encoded, key: Key, *, sign: int) -> None:
        values = encoded.view("<f4")
        for part, start, sent in _slices(out, _segments(out.size, self._fraction)):
            positions = drawn(part.shape, sent, _later(key, out, part))
            _add_at(part, positions, values[start : start + positions.size], sign)


def codec_of(spec: CodecSpec, library: native.Library | None = native.LIBRARY) -> Codec:
    """Return the codec of a table's settings.

    Args:
        spec: the settings.
        library: the compiled code; None: compute with torch.
    """
    return _CODECS[spec.kind](library, spec.fraction)


_CODECS: dict[CodecKind, Callable[[native.Library | None, float], Codec]] = {
    CodecKind.INT8: lambda library, _: Int8(library),
    CodecKind.INT4: lambda library, _: Int4(library),
    CodecKind.SIGN: lambda library, _: Sign(library),
    CodecKind.TOPK: TopK,
    CodecKind.RANDOMK: RandomK,
}


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


def _later(key: Key, chunk: Array, part: Array) -> Key:
    """Return the key of a part of a chunk: the shorter last segment follows the whole ones."""
    whole = chunk.size // SEGMENT_ELEMENTS
    return key if part.shape[1] == SEGMENT_ELEMENTS else key._replace(segment=key.segment + whole)


def _segments(elements: int, fraction: float) -> list[tuple[int, int, int]]:
    """Return (number of segments, their length, elements that are sent of each):
    the whole ones, and a shorter last one.
    """
    whole, rest = divmod(elements, SEGMENT_ELEMENTS)
    found = [(whole, SEGMENT_ELEMENTS), (1, rest)]
    return [
        (rows, length, max(1, round(length * fraction)))
        for rows, length in found
        if rows and length
    ]


def _slices(flat: Array, parts: list[tuple[int, int, int]]) -> Iterator[tuple[Array, int, int]]:
    """Yield a view of each part as rows, the number of elements that are sent before it, and the
    number that is sent of each row.
    """
    first = start = 0
    for rows, length, sent in parts:
        yield flat[first : first + rows * length].reshape(rows, length), start, sent
        first += rows * length
        start += rows * sent


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


def _add_at(rows: Array, positions: NDArray[np.int64], values: Array, sign: int) -> None:
    """Add values at positions of each row, no two of which are equal."""
    flat = rows.reshape(-1)
    at = (positions + np.arange(len(rows))[:, None] * rows.shape[1]).reshape(-1)
    if sign > 0:
        flat[at] += values
    else:
        flat[at] -= values


def _sums(blocks: Tensor) -> Tensor:
    """Return the sum of each row, added in an order that its length alone decides; overwrites
    the rows.
    """
    while (width := blocks.shape[1]) > 1:
        half = width // 2
        blocks[:, :half].add_(blocks[:, width - half :])
        blocks = blocks[:, : width - half]
    return blocks[:, 0]


def _rounded(blocks: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, and its elements as whole numbers of at most `levels` in
    magnitude: all 0 where the scale is 0 or not finite.
    """
    scale = _one_nan(blocks.abs().amax(dim=1).div_(levels))
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    return scale, (blocks / divisor[:, None]).round_().nan_to_num_(0.0)


def _one_nan(numbers: Tensor) -> Tensor:
    """Give every NaN the same bits, in place: which it has depends on the instructions."""
    return numbers.masked_fill_(numbers.isnan(), torch.nan)


def _blocks(elements: int, block: int = BLOCK) -> int:
    return -(-elements // block)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _split(
    encoded: Encoded, elements: int, kind: type[np.int8 | np.uint8], block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Return the numbers of the blocks, and the rest, over the memory of `encoded`."""
    first = 4 * _blocks(elements, block)
    if not encoded.flags.writeable:
        encoded = encoded.copy()  # torch warns about read-only memory
    return torch.from_numpy(encoded[:first].view("<f4")), torch.from_numpy(
        encoded[first:].view(kind)
    )


def _blocks_of(flat: Tensor, block: int = BLOCK) -> list[tuple[Tensor, int]]:
    """Return views of a flat tensor as rows of `block` elements with their starts, a tile each;
    last a shorter row.
    """
    whole = flat.numel() // block * block
    parts = [
        (flat[start : min(start + TILE, whole)].view(-1, block), start)
        for start in range(0, whole, TILE)
    ]
    return parts if whole == flat.numel() else [*parts, (flat[whole:].view(1, -1), whole)]
