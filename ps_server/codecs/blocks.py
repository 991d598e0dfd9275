"""Codecs that treat each block of 256 elements by itself: first the scales of all blocks, then
the codes of all elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ps_server.codecs.base import Array, Codec, Encoded, Key, aligned

BLOCK = 256
"""A segment has a whole number of blocks."""
TILE = 64 * 1024
"""Elements that are encoded at a time; a multiple of `BLOCK`."""
SMALLEST_SCALE = 2.0**-126
"""Scales below are 0: float32 has fewer digits there, and processes compute without denormal
numbers.
"""


class BlockCodec(Codec):
    """A codec of rows of elements that share a scale; a subclass encodes and decodes rows.

    It does so by operations of torch on the device of its arguments, and waits for none. A divisor
    is a tensor: on a GPU torch would multiply by the inverse of a Python number.
    """

    shared: ClassVar[int] = BLOCK
    """Elements that share a scale; they divide a block."""
    bits: ClassVar[int]
    """Of an element's code."""

    def size(self, elements: int) -> int:
        return aligned(self._scale_bytes(elements) + -(-elements * self.bits // 8))

    @abstractmethod
    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale of each row, and the codes of all elements as bytes, flat."""

    @abstractmethod
    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        """Return rows of this shape."""

    def compress_whole(self, left: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes of a flat tensor on any device, which then holds what was
        not sent.
        """
        whole = left.numel() // self.shared * self.shared
        parts = (left[:whole].view(-1, self.shared), left[whole:].view(1, -1))
        found = []
        for rows in parts:
            if rows.numel():
                scale, codes = self.encode_rows(rows)
                rows.sub_(self.decode_rows(scale, codes, rows.shape))
                found.append((scale, codes))
        return torch.cat([scale for scale, _ in found]), torch.cat([codes for _, codes in found])

    def encode(self, exact: Array, out: Encoded, key: Key) -> None:
        scales, codes = self._split(out, exact.size)
        codes[-(-exact.size * self.bits // 8) :] = 0
        for rows, start in self._rows(exact):
            scale, own = self.encode_rows(rows)
            first = start // self.shared
            scales[first : first + len(scale)].copy_(scale)
            first = start * self.bits // 8
            codes[first : first + len(own)].copy_(own)

    def decode(self, encoded: Encoded, out: Array, key: Key) -> None:
        for rows, decoded in self._decoded(encoded, out):
            rows.copy_(decoded)

    def add(self, out: Array, encoded: Encoded, key: Key, *, sign: int = 1) -> None:
        for rows, decoded in self._decoded(encoded, out):
            rows.add_(decoded, alpha=sign)

    def _decoded(self, encoded: Encoded, out: Array) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of `out`, and what was sent of them."""
        if not encoded.flags.writeable:
            encoded = encoded.copy()  # torch warns about read-only memory
        scales, codes = self._split(encoded, out.size)
        for rows, start in self._rows(out):
            first, stop = start * self.bits // 8, -(-(start + rows.numel()) * self.bits // 8)
            scale = scales[start // self.shared :][: len(rows)]
            yield rows, self.decode_rows(scale, codes[first:stop], rows.shape)

    def _scale_bytes(self, elements: int) -> int:
        return 4 * -(-elements // self.shared)

    def _split(self, encoded: Encoded, elements: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes, over the memory of `encoded`."""
        first = self._scale_bytes(elements)
        return torch.from_numpy(encoded[:first].view("<f4")), torch.from_numpy(encoded[first:])

    def _rows(self, flat: Array) -> list[tuple[Tensor, int]]:
        """Return views of elements as rows that share a scale, with their starts, a tile each;
        last a shorter row.
        """
        elements, whole = torch.from_numpy(flat), flat.size // self.shared * self.shared
        parts = [
            (elements[start : min(start + TILE, whole)].view(-1, self.shared), start)
            for start in range(0, whole, TILE)
        ]
        rest = elements[whole:].view(1, -1)
        return [*parts, (rest, whole)] if rest.numel() else parts


def rounded(rows: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, and its elements as whole numbers of at most `levels` in
    magnitude: all 0 where the scale is 0 or not finite.
    """
    scale = one_nan(rows.abs().amax(dim=1).div_(rows.new_full((), levels)))
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    return scale, (rows / divisor[:, None]).round_().nan_to_num_(0.0)


def one_nan(numbers: Tensor) -> Tensor:
    """Give every NaN the same bits, in place: which it has depends on the instructions."""
    return numbers.masked_fill_(numbers.isnan(), torch.nan)


class Int8(BlockCodec):
    """`int8`: the scales of all blocks, then a whole number of 8 bits for each element."""

    name = "int8"
    bits = 8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale, numbers = rounded(rows, 127.0)
        return scale, numbers.to(torch.int8).view(torch.uint8).view(-1)

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        return codes.view(torch.int8).view(shape).float().mul_(scales[:, None])


class Int4(BlockCodec):
    """`int4`: the scales of all blocks of 64, then 4 bits for each element: its whole number + 8,
    the lower half first.
    """

    name = "int4"
    shared = 64
    bits = 4

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale, whole = rounded(rows, 7.0)
        numbers = whole.add_(8.0).to(torch.uint8).view(-1)
        packed = numbers.new_zeros(-(-numbers.numel() // 2))
        # of an odd number the last half byte is 0
        packed[: numbers.numel() // 2].copy_(numbers[1::2]).mul_(16)
        return scale, packed.add_(numbers[::2])

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        numbers = torch.stack([codes % 16, codes // 16], dim=1).view(-1)[: shape.numel()]
        return numbers.view(shape).float().sub_(8.0).mul_(scales[:, None])


class Sign(BlockCodec):
    """`sign`: the mean magnitudes of all blocks, then one bit for each element, 1 below 0, lowest
    bit first.
    """

    name = "sign"
    bits = 1

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        means = one_nan(_sums(rows.abs()).div_(rows.new_full((), rows.shape[1])))
        bits = torch.zeros(-(-rows.numel() // 8) * 8, dtype=torch.uint8, device=rows.device)
        bits[: rows.numel()].copy_(rows.view(-1) < 0)
        return means, bits.view(-1, 8).mul_(_powers(bits)).sum(dim=1, dtype=torch.uint8)

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        bits = codes[:, None].bitwise_and(_powers(codes)).ne(0).view(-1)[: shape.numel()]
        signs = bits.view(shape).float().mul_(-2.0).add_(1.0)
        return signs.mul_(scales[:, None])


def _powers(like: Tensor) -> Tensor:
    """Return the bytes 1, 2, 4 ... 128."""
    ones = like.new_ones(8)
    return ones.bitwise_left_shift(ones.cumsum(0, dtype=torch.uint8).sub_(1))


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, added in an order that its length alone decides; overwrites
    the rows.
    """
    while (width := rows.shape[1]) > 1:
        half = width // 2
        rows[:, :half].add_(rows[:, width - half :])
        rows = rows[:, : width - half]
    return rows[:, 0]
