"""`sign`: the sign of each element, with the mean magnitude of each block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ps_server.codecs.blocks import BlockCodec, one_nan


class Sign(BlockCodec):
    """The magnitudes of all blocks, then one bit for each element, 1 below 0, lowest bit first."""

    name = "sign"
    bits = 1

    def encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        means = one_nan(_sums(rows.abs()).div_(rows.shape[1]))
        return means, torch.from_numpy(np.packbits(rows.numpy() < 0, bitorder="little"))

    def decode_rows(self, scales: Tensor, codes: Tensor, shape: torch.Size) -> Tensor:
        bits = np.unpackbits(codes.numpy(), count=shape.numel(), bitorder="little")
        signs = torch.from_numpy(bits).view(shape).float().mul_(-2.0).add_(1.0)
        return signs.mul_(scales[:, None])


def _sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, added in an order that its length alone decides; overwrites
    the rows.
    """
    while (width := rows.shape[1]) > 1:
        half = width // 2
        rows[:, :half].add_(rows[:, width - half :])
        rows = rows[:, : width - half]
    return rows[:, 0]
