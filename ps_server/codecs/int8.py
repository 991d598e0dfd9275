"""`int8`: whole numbers of 8 bits, with one scale for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_server.codecs.blocks import BlockCodec, rounded

LEVELS = 127.0


class Int8(BlockCodec):
    """The scales of all blocks, then one byte for each element."""

    name = "int8"
    bits = 8

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale, numbers = rounded(rows, LEVELS)
        return scale, numbers.to(torch.int8).view(torch.uint8).view(-1)

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        return codes.view(torch.int8).view(shape).float().mul_(scales[:, None])
