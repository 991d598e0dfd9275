"""Rows of numbers of 2, 4 or 8 bits with a scale and a bias for each row, and sums over them.

A fused row has scale and bias behind its numbers, as bytes; else a tensor (rows, 2) has them.

A fused row of 2 or 4 bits has several numbers in a byte, the first in the lowest bits, then scale
and bias as 16-bit floats. The largest and the least value of a row give both; Caffe2's engine
GREEDY makes no difference. Pruned rows are left out of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, operator
from poseidon.caffe2.operators.sparse.segments import ids_of

constant = partial(operator, gradient=NO_GRADIENT)
"""Registers an operator through which no gradient flows."""
SMALLEST_RANGE = 1e-8
"""What is added to the range of a row, so that a row of equal values has a scale."""


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row from 0 to 255, and the pairs (scale, bias) of all rows."""
    rows = x.float()
    if rows.shape[1] == 0:
        return rows.to(torch.uint8), rows.new_zeros(rows.shape[0], 2)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    numbers = torch.round((rows - low) * (255 / (high - low + SMALLEST_RANGE)))
    return numbers.clamp(0, 255).to(torch.uint8), torch.cat([(high - low) / 255, low], 1)


def _restored(numbers: Tensor, pairs: Tensor) -> Tensor:
    return numbers.float() * pairs[:, :1] + pairs[:, 1:]


def _split(fused: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers of fused rows and the pairs (scale, bias), which have a type."""
    width = fused.shape[1] - 2 * dtype.itemsize
    if fused.is_meta:
        return fused[:, :width], torch.empty(len(fused), 2, device="meta")
    pairs = fused[:, width:].clone(memory_format=torch.contiguous_format)
    return fused[:, :width], pairs.view(dtype).float()


def _register_fused(suffix: str, pairs_type: torch.dtype) -> None:
    """Register the conversions of fused rows whose scale and bias have a type."""

    def quantize(x: Tensor) -> Tensor:
        short = pairs_type == torch.float16 and x.shape[1]
        numbers, pairs = _numbers(x, 8) if short else _quantized(x)
        if x.is_meta:
            return numbers.new_empty(len(numbers), numbers.shape[1] + 2 * pairs_type.itemsize)
        return torch.cat([numbers, pairs.to(pairs_type).view(torch.uint8)], 1)

    def restore(fused: Tensor) -> Tensor:
        return _restored(*_split(fused, pairs_type))

    def restore_half(fused: Tensor) -> Tensor:
        """Return fused rows' values as 16-bit numbers; not of 16-bit pairs, as in Caffe2."""
        return restore(fused) if pairs_type == torch.float16 else restore(fused).half()

    for source in ("Float", "HalfFloat"):
        constant(f"{source}ToFused8BitRowwiseQuantized{suffix}", expected="N D")(quantize)
    constant(f"Fused8BitRowwiseQuantized{suffix}ToFloat", expected="N D")(restore)
    constant(f"Fused8BitRowwiseQuantized{suffix}ToHalfFloat", expected="N D")(restore_half)


_register_fused("", torch.float32)
_register_fused("HalfScaleBias", torch.float16)


@constant("FloatToRowwiseQuantized8Bits", expected="N D *")
def float_to_rowwise_quantized_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit numbers, and the scale and bias of each row."""
    numbers, pairs = _quantized(x.flatten(1))
    return numbers.reshape(x.shape), pairs


@constant("Rowwise8BitQuantizedToFloat", expected="N D *, N 2")
def rowwise_8_bit_quantized_to_float(numbers: Tensor, pairs: Tensor) -> Tensor:
    """Return the values of 8-bit numbers with the scale and bias of each row."""
    return _restored(numbers.flatten(1), pairs).reshape(numbers.shape)


@operator("GatherFused8BitRowwise", expected="N D, I")
def gather_fused_8_bit_rowwise(fused: Tensor, indices: Tensor) -> Tensor:
    """Return the values of the fused rows that the indices name."""
    return _restored(*_split(fused[indices.long()], torch.float32))


def reduced_rows(rows: Tensor, weights: Tensor | None, lengths: Tensor, mean: bool) -> Tensor:
    """Return the weighted sum or mean of the rows of each segment; 0 for an empty one."""
    made = rows.new_zeros(len(lengths), rows.shape[1])
    weighted = rows if weights is None else rows * weights.float()[:, None]
    total = made.index_add(0, ids_of(lengths, len(rows)), weighted)
    return total / lengths.clamp(min=1)[:, None] if mean else total


def _by_pairs(x: Tensor, indices: Tensor, pairs: Tensor) -> Tensor:
    rows = indices.long()
    return _restored(x[rows], pairs[rows])


def _register_reductions(kind: str, name: str, rows_of: Callable[..., Tensor], *more: str) -> None:
    """Register the sum or the mean of rows, plain and weighted.

    Args:
        kind: Sum or Mean.
        name: the end of the operators' names.
        rows_of: returns the values of the rows that indices name; it gets further inputs, too.
        more: the shapes of the further inputs.
    """
    mean, count = kind == "Mean", len(more)

    def plain(x: Tensor, indices: Tensor, lengths: Tensor, *rest: Tensor) -> Tensor:
        return reduced_rows(rows_of(x, indices, *rest), None, lengths, mean)

    def weighted(
        x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor, *rest: Tensor
    ) -> Tensor:
        return reduced_rows(rows_of(x, indices, *rest), weights, lengths, mean)

    shapes = ", ".join(["I, M", *more])
    inputs = 3 + count, 3 + count
    constant(f"SparseLengths{kind}{name}", inputs=inputs, expected=f"N D, {shapes}")(plain)
    inputs, name = (4 + count, 4 + count), f"SparseLengthsWeighted{kind}{name}"
    constant(name, inputs=inputs, expected=f"N D, I, {shapes}")(weighted)


for _kind in ("Sum", "Mean"):
    _register_reductions(_kind, "Fused8BitRowwise", gather_fused_8_bit_rowwise)
    _register_reductions(_kind, "8BitsRowwise", _by_pairs, "N 2")


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


def _restored_low_bit(fused: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(8 // bits, dtype=torch.uint8, device=fused.device) * bits
    numbers = ((fused[:, :-4].unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)
    pairs = fused[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    return numbers.float() * pairs[:, :1] + pairs[:, 1:]


def _looked_up(indices: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of indices that are not pruned, and which those are; one 0 prunes none."""
    if table.numel() == 1 and not table.any():
        return indices, torch.ones_like(indices, dtype=torch.bool)
    found = table[indices.long()]
    return found[found >= 0].to(indices.dtype), found >= 0


def _left(kept: Tensor, lengths: Tensor) -> Tensor:
    """Return the segment of each index that is not pruned."""
    return ids_of(lengths)[kept]


@constant("SparseLengthsSumSparseLookup", inputs=(3, 4), outputs=(2, 3), expected="I, M, T, I")
def sparse_lengths_sum_sparse_lookup(
    indices: Tensor, lengths: Tensor, table: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the rows of indices that are not -1, the segments' lengths, and the weights.

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
        return (
            gather_fused_8_bit_rowwise(x, rows)
            if bits == 8
            else _restored_low_bit(x[rows.long()], bits)
        )

    def quantize(x: Tensor) -> Tensor:
        numbers, pairs = _numbers(x, bits)
        return torch.cat([_packed(numbers, bits), pairs.view(torch.uint8)], 1)

    def fake(x: Tensor) -> Tensor:
        """Return fused rows of 8-bit numbers, which have the values of fewer bits."""
        numbers, pairs = _numbers(x, bits)
        return torch.cat([numbers, pairs.float().view(torch.uint8)], 1)

    def restore(fused: Tensor) -> Tensor:
        return _restored_low_bit(fused, bits)

    def restore_half(fused: Tensor) -> Tensor:
        return _restored_low_bit(fused, bits).half()

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        f"FloatToFused{bits}BitRowwiseQuantized": quantize,
        f"HalfToFused{bits}BitRowwiseQuantized": quantize,
        f"FloatToFused{bits}BitFakeRowwiseQuantized": fake,
        f"HalfToFused{bits}BitFakeRowwiseQuantized": fake,
        f"Fused{bits}BitRowwiseQuantizedToFloat": restore,
        f"Fused{bits}BitRowwiseQuantizedToHalf": restore_half,
    }
    for name, form in forms.items() if bits < 8 else ():
        constant(name, expected="N D")(form)
    for kind in ("Sum", "Mean"):
        if bits < 8:
            _register_reductions(kind, f"Fused{bits}BitRowwise", gathered)
        _register_pruned(bits, kind, gathered)


def _register_pruned(bits: int, kind: str, gathered: Callable[[Tensor, Tensor], Tensor]) -> None:
    def pruned(x: Tensor, indices: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Return the fused rows' sum or mean for the indices; pruned ones are 0."""
        ones = torch.ones_like(indices, dtype=torch.float32)
        return pruned_weighted(x, ones, indices, lengths, table)

    def pruned_weighted(
        x: Tensor, weights: Tensor, indices: Tensor, lengths: Tensor, table: Tensor
    ) -> Tensor:
        """Return the fused rows' weighted sum or mean for the indices; pruned ones are 0."""
        found, kept = _looked_up(indices, table)
        rows = gathered(x, found)
        made = rows.new_zeros(len(lengths), rows.shape[1])
        total = made.index_add(0, _left(kept, lengths), rows * weights[kept].float()[:, None])
        return total / lengths.clamp(min=1)[:, None] if kind == "Mean" else total

    constant(f"SparseLengths{kind}{bits}BitRowwiseSparse", expected="N D, I, M, T")(pruned)
    constant(f"SparseLengthsWeighted{kind}{bits}BitRowwiseSparse", expected="N D, I, I, M, T")(
        pruned_weighted
    )


for _bits in (2, 4, 8):
    _register(_bits)
