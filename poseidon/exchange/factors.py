"""Sufficient factors: the gradient of a fully-connected weight without the gradient.

A layer y = x W^T with W of N x M has the weight gradient u^T v, u (K x N) the gradient at its output and v (K x M) its
input, K rows a worker. The gradient of W workers together is one matrix product of their stacked factors (Xie et al.,
"Lighter-communication distributed machine learning via sufficient factor broadcasting", UAI 2016).

Law: the product is never formed as a whole. It is made tile by tile, a tile being a part of the weight that stays in
the processor's cache, and the update rule is applied to each tile at once. Rules treat elements alike, so the tiles
change nothing. Factors are stacked in worker order, so that all workers compute the same bits.

Shape letters: B rows of all workers together, N outputs, M inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array
from ps_server import Rule
from ps_server.rules import update

TILE_ELEMENTS = 2**19
"""2 MiB: a tile and what the rule needs beside it stay in a third-level cache that several workers share."""
TILE_COLUMNS = 2048
"""A product packs its factors anew for each tile, and 41 whole rows of a weight of 25088 columns pack all of v for little
work: so they took a quarter longer."""
DEVICE_TILE_ELEMENTS = 2**20
"""On an accelerator, of whole rows: each tile costs some launches."""


class Scratch:
    """Memory for one tile and for stacked factors, kept and reused; it grows to the largest that is asked for.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """An uninitialized rows x columns matrix under this name; it is the last one's memory where that is enough."""
        return self._take(name, rows, columns, self._device)

    def stack(self, name: str, parts: Sequence[Array], columns: int) -> Tensor:
        """The parts below each other, on the device.

        Args:
            name: of the memory where the result lives until the next call with this name.
            parts: each rows x columns, on the host; any may have no rows.
            columns: their width.
        """
        rows = sum(len(part) for part in parts)
        on_host = self._take(f"{name} on the host", rows, columns, torch.device("cpu"))
        np.concatenate([np.empty((0, columns), np.float32), *parts], out=on_host.numpy())
        if self._device.type == "cpu":
            return on_host
        return self.take(name, rows, columns).copy_(on_host, non_blocking=True)

    def _take(self, name: str, rows: int, columns: int, device: torch.device) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < rows * columns:
            pinned = device.type == "cpu" and self._device.type == "cuda"
            memory = torch.empty(rows * columns, device=device, dtype=torch.float32, pin_memory=pinned)
            self._memory[name] = memory
        return memory[: rows * columns].view(rows, columns)


def apply_factors(
    rule: Rule,
    u_BN: Tensor,
    v_BM: Tensor,
    value_NM: Tensor,
    history: Sequence[Tensor],
    *,
    rate: float,
    step: int,
    scale: float,
    scratch: Scratch,
) -> None:
    """Apply a rule to the gradient `scale * u^T v`, tile by tile.

    Args:
        rule: the rule and its constants.
        u_BN: gradients at the outputs, stacked.
        v_BM: inputs, stacked alike.
        value_NM: the weight; updated in place.
        history: what the rule keeps, each N x M; updated in place.
        rate: the solver's rate.
        step: 0-based number of this update.
        scale: multiplies the gradient before decay (1 / workers, limits, 1 / iter_size).
        scratch: memory for a tile.
    """
    for rows, columns in _tiles(*value_NM.shape, on_host=value_NM.device.type == "cpu"):
        gradient = scratch.take("tile", rows.stop - rows.start, columns.stop - columns.start)
        torch.addmm(gradient, u_BN[:, rows].t(), v_BM[:, columns], beta=0, alpha=scale, out=gradient)
        part = value_NM[rows, columns]
        update(rule, gradient, [h[rows, columns] for h in history], part, rate=rate, step=step)


def _tiles(outputs: int, inputs: int, *, on_host: bool) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of each tile; together they are the weight."""
    columns = min(inputs, TILE_COLUMNS) if on_host else inputs
    rows = max(1, (TILE_ELEMENTS if on_host else DEVICE_TILE_ELEMENTS) // columns)
    for top in range(0, outputs, rows):
        for left in range(0, inputs, columns):
            yield slice(top, min(top + rows, outputs)), slice(left, min(left + columns, inputs))


def factors_sum_of_squares(u_BN: Tensor, v_BM: Tensor) -> float:
    """The sum of squared elements of u^T v, from B x B products: |u^T v|^2 = sum((u u^T) * (v v^T)).

    In float64, as `ps_server.rules.sum_of_squares` is for gradients that exist.
    """
    u, v = u_BN.double(), v_BM.double()
    return float(((u @ u.t()) * (v @ v.t())).sum())
