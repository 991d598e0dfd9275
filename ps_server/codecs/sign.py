"""`sign`: the sign of each element, with the mean magnitude of each block."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_server.codecs.blocks import BlockCodec, one_nan


class Sign(BlockCodec):
    """The magnitudes of all blocks, then one bit for each element, 1 below 0, lowest bit first."""

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
