"""`int4`: whole numbers of 4 bits, with one scale for each block of 64 elements."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_server.codecs.blocks import BlockCodec, rounded

LEVELS = 7.0


class Int4(BlockCodec):
    """The scales of all blocks, then 4 bits for each element: its number + 8, the lower half
    first.
    """

    name = "int4"
    shared = 64
    bits = 4

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale, whole = rounded(rows, LEVELS)
        numbers = whole.add_(8.0).to(torch.uint8).view(-1)
        packed = numbers.new_zeros(-(-numbers.numel() // 2))
        # of an odd number the last half byte is 0
        packed[: numbers.numel() // 2].copy_(numbers[1::2]).mul_(16)
        return scale, packed.add_(numbers[::2])

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        numbers = torch.stack([codes % 16, codes // 16], dim=1).view(-1)[: shape.numel()]
        return numbers.view(shape).float().sub_(8.0).mul_(scales[:, None])
