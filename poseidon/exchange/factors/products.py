"""Sufficient factors: the gradient of a fully-connected weight without the gradient.

A layer y = x W^T with W of N x M has the weight gradient u^T v, u (K x N) the gradient at its
output and v (K x M) its input, K rows a worker. The gradient of W workers together is one matrix
product of their stacked factors (Xie et al., "Lighter-communication distributed machine learning
via sufficient factor broadcasting", UAI 2016).

Laws:

* The product is never formed as a whole. It is made tile by tile, a tile being a part of the weight
  that stays in the processor's cache, and the update rule is applied to each tile at once. Rules
  treat elements alike, so the tiles change nothing. Factors are stacked in worker order.
* Every worker computes the same bits, whatever its number of threads, the alignment of its memory
  and its vector width. So the order of each sum is fixed here and not left to a library (`Kernel`),
  and the scale is applied after the sum.

Shape letters: B rows of all workers together, K rows of one block, N outputs, M inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.exchange.base import Array
from poseidon.exchange.device import device_of
from ps_server import Rule
from ps_server.rules import update

TILE_ELEMENTS = 2**19
"""2 MiB: a tile and what the rule needs beside it stay in a third-level cache that several
workers share.
"""
TILE_COLUMNS = 2048
"""A product packs its factors again for each tile, and 41 whole rows of a weight of 25088 columns
pack all of v for little work: so they took a quarter longer.
"""
BLOCK_ROWS = 256
"""Rows of factors in one product of `Kernel.FUSED`. oneDNN adds up to some 300 rows in one
chain, element by element; longer sums it splits, and where depends on the vector width and the
number of threads.
"""
DEVICE_TILE_ELEMENTS = 2**20
"""On an accelerator, of whole rows: each tile costs some launches."""


class Kernel(Enum):
    """How a tile of u^T v is computed. Members are in order of preference: the fastest first."""

    FUSED = "fused"
    """Blocks of `BLOCK_ROWS` rows, one after another.

    On a CPU oneDNN computes a block, each element as one chain of fused multiply-adds in the order
    of rows: the same bits on all x86 processors with AVX2 and FMA, AVX-512 included. On a GPU
    cuBLAS computes it: the same bits on GPUs of one model.
    """
    PORTABLE = "portable"
    """Row by row, a rounded multiplication and a rounded addition: the same bits on every
    processor that keeps to IEEE 754, 5 to 13 times slower.
    """


class Scratch:
    """Memory for one tile and for stacked factors, kept and reused; it grows to the largest that
    is needed.

    Attributes:
        kernel: how products are computed in it; the same on all workers.
    """

    def __init__(self, device: torch.device, kernel: Kernel = Kernel.FUSED) -> None:
        self.kernel = kernel
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, *, on_host: bool = False) -> Tensor:
        """Return an uninitialized rows x columns matrix on the device, or for copies to it, in the
        memory of the last one of this name where that is enough.
        """
        memory = self._memory.get(name)
        if memory is None or memory.numel() < rows * columns:
            if on_host or self._device.type == "cpu":
                memory = device_of(self._device).host_memory(rows * columns)
            else:
                memory = torch.empty(rows * columns, device=self._device, dtype=torch.float32)
            self._memory[name] = memory
        return memory[: rows * columns].view(rows, columns)

    def packed(self, name: str, matrix_BX: Tensor, columns: slice) -> Tensor:
        """Return these columns without gaps between rows: oneDNN computes matrices
        with gaps by its slow reference code.
        """
        if columns.stop - columns.start == matrix_BX.shape[1]:
            return matrix_BX
        return self.take(name, len(matrix_BX), columns.stop - columns.start).copy_(
            matrix_BX[:, columns]
        )

    def stack(self, name: str, parts: Sequence[Array], columns: int) -> Tensor:
        """Return the parts below each other, on the device.

        Args:
            name: of the memory where the result lives until the next call with this name.
            parts: each rows x columns, on the host; any may have no rows.
        """
        rows = sum(len(part) for part in parts)
        on_host = self.take(f"{name} on the host", rows, columns, on_host=True)
        np.concatenate([np.empty((0, columns), np.float32), *parts], out=on_host.numpy())
        if self._device.type == "cpu":
            return on_host
        return self.take(name, rows, columns).copy_(on_host, non_blocking=True)

    def own(self, name: str, part: Array) -> Tensor:
        """Return a matrix of `FactorWeight.copy` on the device. It stays as it is until the work
        that uses it is done.
        """
        on_host = torch.from_numpy(part)
        if self._device.type == "cpu":
            return on_host
        return self.take(name, *on_host.shape).copy_(on_host, non_blocking=True)


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
        u_BN: gradients at the outputs, stacked.
        v_BM: inputs, stacked alike.
        value_NM: the weight; updated in place.
        history: what the rule keeps, each N x M; updated in place.
        rate: the solver's rate.
        step: 0-based number of this update.
        scale: multiplies the gradient before decay (1 / workers, limits, 1 / iter_size).
    """
    add_product = _PRODUCTS[scratch.kernel]
    for columns, tiles in _tiles(*value_NM.shape, on_host=value_NM.device.type == "cpu"):
        v_BC = scratch.packed("v tile", v_BM, columns)
        for rows in tiles:
            u_BR = scratch.packed("u tile", u_BN, rows)
            gradient = scratch.take("tile", u_BR.shape[1], v_BC.shape[1]).zero_()
            add_product(gradient, u_BR, v_BC, scratch)
            if scale != 1.0:
                gradient.mul_(scale)
            part = value_NM[rows, columns]
            update(rule, gradient, [h[rows, columns] for h in history], part, rate=rate, step=step)


def _add_fused(tile_RC: Tensor, u_BR: Tensor, v_BC: Tensor, scratch: Scratch) -> None:
    for u_KR, v_KC in _blocks(u_BR, v_BC):
        if tile_RC.device.type == "cpu":
            tile_RC.add_(ONEDNN_LINEAR(u_KR.t(), v_KC.t(), None, "none", [], ""))
        else:
            tile_RC.addmm_(u_KR.t(), v_KC)


def _add_portably(tile_RC: Tensor, u_BR: Tensor, v_BC: Tensor, scratch: Scratch) -> None:
    product = scratch.take("product", *tile_RC.shape)
    for u_KR, v_KC in _blocks(u_BR, v_BC):
        for u_R, v_C in zip(u_KR, v_KC, strict=True):
            tile_RC.add_(torch.mul(u_R.unsqueeze(1), v_C, out=product))


def _blocks(u_BR: Tensor, v_BC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the factors of a tile in blocks of `BLOCK_ROWS` rows.

    Of many rows those that are zero in the tile are left out, and add nothing: a gradient that
    travels as rows with a single 1 (`taps.rows_of`) has few others. On an accelerator they stay: to
    know which they are, the host would wait for it.
    """
    leaves_out = len(u_BR) > BLOCK_ROWS and u_BR.device.type == "cpu"
    for start in range(0, len(u_BR), BLOCK_ROWS):
        u_KR, v_KC = u_BR[start : start + BLOCK_ROWS], v_BC[start : start + BLOCK_ROWS]
        if leaves_out:
            used = u_KR.any(1).logical_and_(v_KC.any(1)).nonzero().flatten()
            if len(used) < len(u_KR):
                u_KR, v_KC = u_KR[used], v_KC[used]
        if len(u_KR):
            yield u_KR, v_KC


_PRODUCTS: dict[Kernel, Callable[[Tensor, Tensor, Tensor, Scratch], None]] = {
    Kernel.FUSED: _add_fused,
    Kernel.PORTABLE: _add_portably,
}
ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
"""What torch.compile calls for a linear layer; None where torch was built without oneDNN."""


def _tiles(outputs: int, inputs: int, *, on_host: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Yield columns with the rows of each tile that has them; together the tiles are the weight."""
    columns = min(inputs, TILE_COLUMNS) if on_host else inputs
    rows = max(1, (TILE_ELEMENTS if on_host else DEVICE_TILE_ELEMENTS) // columns)
    tops = [slice(top, min(top + rows, outputs)) for top in range(0, outputs, rows)]
    for left in range(0, inputs, columns):
        yield slice(left, min(left + columns, inputs)), tops


def factors_sum_of_squares(u_BN: Tensor, v_BM: Tensor) -> float:
    """Return the sum of squared elements of u^T v, from B x B products: |u^T v|^2 = sum((u u^T)
    * (v v^T)).

    In float64, as `ps_server.rules.sum_of_squares` is for gradients that exist.
    """
    u, v = u_BN.double(), v_BM.double()
    return float(((u @ u.t()) * (v @ v.t())).sum())
