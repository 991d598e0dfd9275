"""Rows of 2-bit and 4-bit numbers with a scale and a bias for each row, and sums over rows of
which some are pruned.

A fused row has several numbers in a byte, the first in the lowest bits, and behind them its scale
and bias as 16-bit floats. The largest and the least value of a row give both; the engine GREEDY of
Caffe2 makes no difference here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, operator
from poseidon.caffe2.operators.sparse.quantized_rows import gather_fused_8_bit_rowwise, reduced_rows
from poseidon.caffe2.operators.sparse.segments import ids_of


def _numbers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row, and the pairs (scale, bias) of all rows, 16-bit."""
    rows, most = x.float(), (1 << bits) - 1
    low = rows.amin(1, keepdim=True).half().float()
    scale = ((rows.amax(1, keepdim=True) - low) / most).half().float()
    scale = torch.where((scale == 0) | torch.isinf(1 / scale), 1, scale)
    numbers = torch.round((rows - low) * (1 / scale)).clamp(0, most).to(torch.uint8)
    return numbers, torch.cat([scale, low], 1).half()


def _packed(numbers: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    wide = torch.nn.functional.pad(numbers, [0, -numbers.shape[1] % each])
    shifts = torch.arange(each, dtype=torch.uint8, device=numbers.device) * bits
    parts = wide.unflatten(1, (-1, each)) << shifts
    made: Tensor = parts.sum(2, dtype=torch.uint8)
    return made


def _restored(fused: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(8 // bits, dtype=torch.uint8, device=fused.device) * bits
    numbers = ((fused[:, :-4].unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)
    pairs = fused[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    return numbers.float() * pairs[:, :1] + pairs[:, 1:]


def _looked_up(indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each index that is not pruned, and which indices these are; a table of
    one 0 prunes nothing.
    """
    if table.numel() == 1 and not table.any():
        return indices, torch.ones_like(indices, dtype=torch.bool)
    found = table[indices.long()]
    return found[found >= 0].to(indices.dtype), found >= 0


def _left(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return the segment of each index that is not pruned."""
    return ids_of(lengths)[kept]


@operator(
    "SparseLengthsSumSparseLookup",
    gradient=NO_GRADIENT,
    inputs=(3, 4),
    outputs=(2, 3),
    expected="I, M, T, I",
)
def sparse_lengths_sum_sparse_lookup(
    indices: Tensor, lengths: Tensor, table: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the rows that a table gives for indices, -1 left out, the lengths of the segments,
    and the weights.

    Args:
        indices: the indices of all segments.
        lengths: the number of indices of each segment.
        table: the row of each index, -1 for a pruned one; a single 0 for no pruning.
        weights: a weight for each index.
    """
    found, kept = _looked_up(indices, table)
    counts = torch.bincount(_left(kept, lengths), minlength=len(lengths)).to(lengths.dtype)
    return (found, counts) if weights is None else (found, counts, weights[kept])


def _register(bits: int) -> None:
    def gathered(x: Tensor, rows: Tensor) -> Tensor:
        return gather_fused_8_bit_rowwise(x, rows) if bits == 8 else _restored(x[rows.long()], bits)

    def quantize(x: Tensor) -> Tensor:
        numbers, pairs = _numbers(x, bits)
        return torch.cat([_packed(numbers, bits), pairs.view(torch.uint8)], 1)

    def fake(x: Tensor) -> Tensor:
        """Return fused rows of 8-bit numbers, which have the values of fewer bits."""
        numbers, pairs = _numbers(x, bits)
        return torch.cat([numbers, pairs.float().view(torch.uint8)], 1)

    def restore(fused: Tensor) -> Tensor:
        return _restored(fused, bits)

    def restore_half(fused: Tensor) -> Tensor:
        return _restored(fused, bits).half()

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        f"FloatToFused{bits}BitRowwiseQuantized": quantize,
        f"HalfToFused{bits}BitRowwiseQuantized": quantize,
        f"FloatToFused{bits}BitFakeRowwiseQuantized": fake,
        f"HalfToFused{bits}BitFakeRowwiseQuantized": fake,
        f"Fused{bits}BitRowwiseQuantizedToFloat": restore,
        f"Fused{bits}BitRowwiseQuantizedToHalf": restore_half,
    }
    for name, form in forms.items() if bits < 8 else ():
        operator(name, gradient=NO_GRADIENT, expected="N D")(form)
    for kind in ("Sum", "Mean"):
        _register_reductions(bits, kind, gathered)


def _register_reductions(
    bits: int, kind: str, gathered: Callable[[Tensor, Tensor], Tensor]
) -> None:
    mean = kind == "Mean"

    def plain(x: Tensor, indices: Tensor, lengths: Tensor) -> Tensor:
        return reduced_rows(gathered(x, indices), None, lengths, mean)

    def weighted(x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor) -> Tensor:
        return reduced_rows(gathered(x, indices), weights, lengths, mean)

    def pruned(x: Tensor, indices: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Return the sum or mean of the fused rows that a table gives for the indices; pruned
        ones are 0.
        """
        return pruned_weighted(
            x, torch.ones_like(indices, dtype=torch.float32), indices, lengths, table
        )

    def pruned_weighted(
        x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor, table: Tensor
    ) -> Tensor:
        """Return the weighted sum or mean of the fused rows that a table gives for the indices;
        pruned ones are 0.
        """
        found, kept = _looked_up(indices, table)
        rows = gathered(x, found)
        made = rows.new_zeros(len(lengths), rows.shape[1])
        total = made.index_add(0, _left(kept, lengths), rows * weights[kept].float()[:, None])
        return total / lengths.clamp(min=1)[:, None] if mean else total

    if bits < 8:
        operator(
            f"SparseLengths{kind}Fused{bits}BitRowwise", gradient=NO_GRADIENT, expected="N D, I, M"
        )(plain)
        operator(
            f"SparseLengthsWeighted{kind}Fused{bits}BitRowwise",
            gradient=NO_GRADIENT,
            expected="N D, I, I, M",
        )(weighted)
    operator(
        f"SparseLengths{kind}{bits}BitRowwiseSparse", gradient=NO_GRADIENT, expected="N D, I, M, T"
    )(pruned)
    operator(
        f"SparseLengthsWeighted{kind}{bits}BitRowwiseSparse",
        gradient=NO_GRADIENT,
        expected="N D, I, I, M, T",
    )(pruned_weighted)


for _bits in (2, 4, 8):
    _register(_bits)
