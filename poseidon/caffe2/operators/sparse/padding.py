"""Operators on lists of different lengths: padding, packing, and features with ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.arrays.gather import places, taken
from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import ANY, NO_GRADIENT, Context, operator
from poseidon.caffe2.operators.sparse.segments import ids_of


@operator(
    "BatchSparseToDense",
    gradient="BatchDenseToSparse(I0, I1, GO0) -> GI2",
    inputs=(3, 4),
    expected="M, N, N, A D",
)
def batch_sparse_to_dense(
    lengths: Tensor,
    indices: Tensor,
    values: Tensor,
    like: Tensor | None = None,
    *,
    dense_last_dim: int = -1,
    default_value: float = 0.0,
) -> Tensor:
    """Return a row for each example: values at their indices, a default value elsewhere.

    Args:
        lengths: the number of values of each example.
        indices: the column of each value.
        values: one for each index.
        like: a matrix as wide as the result.
        dense_last_dim: the width, where there is no fourth input.

    Raises:
        ValueError: neither gives the width.
    """
    width = dense_last_dim if like is None else like.shape[1]
    if width < 1:
        raise ValueError(
            "BatchSparseToDense needs dense_last_dim, or a fourth input as wide as the result"
        )
    shape = (len(lengths), width)
    dense = torch.full(shape, default_value, dtype=values.dtype, device=values.device)
    if not values.is_meta:
        dense[ids_of(lengths), indices.long()] = values
    return dense


@operator(
    "BatchDenseToSparse",
    gradient="BatchSparseToDense(I0, I1, GO0, I2) -> GI2",
    expected="M, N, M D",
)
def batch_dense_to_sparse(lengths: Tensor, indices: Tensor, dense: Tensor) -> Tensor:
    """Return the values of rows at the columns that the indices of each row name."""
    if dense.is_meta:
        return dense.new_empty(indices.shape)
    return dense[ids_of(lengths), indices.long()]


@operator("DenseVectorToIdList", gradient=NO_GRADIENT, expected="N D")
def dense_vector_to_id_list(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of values of each row that are not 0, and their columns, both int32."""
    rows, columns = torch.nonzero(x, as_tuple=True)
    return torch.bincount(rows, minlength=len(x)).to(torch.int32), columns.to(torch.int32)


@operator("MergeIdLists", gradient=NO_GRADIENT, expected="M, _, ...")
def merge_id_lists(*pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return lengths and values of lists: each example has its lists' values, each once.

    The inputs are pairs of lengths and values.
    """
    ids = torch.cat([ids_of(lengths) for lengths in pairs[0::2]])
    values = torch.cat(list(pairs[1::2]))
    both = torch.unique(torch.stack([ids.to(torch.int64), values.to(torch.int64)]), dim=1)
    lengths = torch.bincount(both[0], minlength=len(pairs[0])).to(pairs[0].dtype)
    return lengths, both[1].to(values.dtype)


@operator("KeySplit")
def key_split(keys: Tensor, *, context: Context, categorical_limit: int) -> tuple[Tensor, ...]:
    """Return for each key from 0 to the limit the places where it is, int32.

    Raises:
        ValueError: a key is negative or not below the limit.
    """
    flat = keys.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < categorical_limit:
        raise ValueError(f"the keys must be from 0 to {categorical_limit - 1}")
    found = (torch.nonzero(flat == k).reshape(-1).to(torch.int32) for k in range(categorical_limit))
    return tuple(found)[: context.outputs]


@operator("IndexHash")
def index_hash(indices: Tensor, *, seed: int = 0, modulo: int) -> Tensor:
    """Return a number from 0 to modulo - 1 for each index; equal indices have equal numbers."""
    width = indices.element_size()
    octets = indices.contiguous().reshape(-1).view(torch.int8).reshape(-1, width).to(indices.dtype)
    start = torch.tensor(seed, dtype=torch.int64) * 0xDEADBEEF
    made = start.to(indices.dtype).to(indices.device).expand(len(octets))
    for place in range(width):
        made = made * 65537 + octets[:, place]  # in the type of the indices, as Caffe2 computes it
    return torch.remainder(made, modulo).reshape(indices.shape)


@operator("NGramFromCategorical", gradient=NO_GRADIENT, expected="N D")
def n_gram_from_categorical(
    x: Tensor, *, col_ids: list[int], categorical_limits: list[int], vals: list[int]
) -> Tensor:
    """Return a number for each example: which combination of values some columns have.

    Args:
        x: floats, whose columns are categories.
        col_ids: the columns.
        categorical_limits: the number of values of each.
        vals: the values of all columns, one column behind the other.
    """
    made = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    base, begin = 1, 0
    for column, count in zip(col_ids, categorical_limits, strict=True):
        known = torch.tensor(vals[begin : begin + count], device=x.device)
        place = (x[:, column].long()[:, None] == known).int().argmax(1)
        made += base * place
        base, begin = base * count, begin + count
    return made


@operator("SparseDropoutWithReplacement", gradient=NO_GRADIENT, expected="N, M")
def sparse_dropout_with_replacement(
    ids: Tensor, lengths: Tensor, *, context: Context, ratio: float, replacement_value: int
) -> tuple[Tensor, Tensor]:
    """Return lists of ids of which some are replaced by a list of one value, and their lengths.

    Args:
        ids: the ids of all examples, one example behind the other.
        lengths: the number of ids of each example.
        context: its random numbers.
        ratio: the probability that a list is replaced.
        replacement_value: the value.
    """
    dropped = torch.rand(len(lengths), generator=context.generator, device=ids.device) < ratio
    made = torch.where(dropped, 1, lengths)
    taken = ids[~torch.repeat_interleave(dropped, lengths.long())]
    found = ids.new_full((int(made.sum()),), replacement_value)
    found[~torch.repeat_interleave(dropped, made.long())] = taken
    return found, made.to(lengths.dtype)


def _lengths(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the lengths of segments; without any all rows are one segment."""
    if lengths is not None:
        return lengths
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _widths(padding_width: int, end_padding_width: int) -> tuple[int, int]:
    return padding_width, padding_width if end_padding_width < 0 else end_padding_width


def _inputs_of_gradient(maker: GradientMaker) -> list[str]:
    return [maker.GO(0), *([maker.O(1)] if len(maker.forward.input) > 1 else [])]


def _add_padding_rule(maker: GradientMaker) -> None:
    inputs = _inputs_of_gradient(maker)
    maker.op("RemovePadding", inputs, [maker.GI(0)])
    if len(maker.forward.input) > 2:
        outputs = [maker.GI(index) for index in range(2, len(maker.forward.input))]
        maker.op("GatherPadding", inputs, outputs)


@operator("AddPadding", gradient=_add_padding_rule, expected="N *S, M, *S, *S")
def add_padding(
    x: Tensor,
    lengths: Tensor | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    *,
    padding_width: int = 1,
    end_padding_width: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return the segments of x with rows before and behind each, and their new lengths.

    Args:
        x: the rows of all segments.
        lengths: the number of rows of each segment; without it there is one segment.
        start, end: the rows that are added, zeros by default; `end` is `start` by default.
        padding_width, end_padding_width: how many are added; by default both are equal.
    """
    before, behind = _widths(padding_width, end_padding_width)
    sizes = _lengths(x, lengths)
    padded = sizes + (before + behind)
    made = x.new_zeros(x.shape[0] + len(sizes) * (before + behind), *x.shape[1:])
    if x.is_meta:
        return made, padded
    starts = (padded.cumsum(0) - padded).long()
    ids = ids_of(sizes, x.shape[0])
    shift = starts + before - (sizes.cumsum(0) - sizes)
    made[torch.arange(x.shape[0], device=x.device) + shift[ids]] = x
    if start is not None:
        end = start if end is None else end
        made[_span(starts, before)] = start
        made[_span(starts + padded - behind, behind)] = end
    return made, padded


def _span(starts: Tensor, width: int) -> Tensor:
    """Return all places from each start on, `width` of them."""
    return (starts[:, None] + torch.arange(width, device=starts.device)).reshape(-1).long()


def _remove_padding_rule(maker: GradientMaker) -> None:
    maker.op("AddPadding", _inputs_of_gradient(maker), [maker.GI(0)])


@operator("RemovePadding", gradient=_remove_padding_rule, expected="N *, M")
def remove_padding(
    x: Tensor, lengths: Tensor | None = None, *, padding_width: int = 1, end_padding_width: int = -1
) -> tuple[Tensor, Tensor]:
    """Return the segments of x without their first and last rows, and their new lengths.

    Raises:
        ValueError: a segment is shorter than its padding.
    """
    before, behind = _widths(padding_width, end_padding_width)
    sizes = _lengths(x, lengths)
    kept = sizes - (before + behind)
    if not x.is_meta and sizes.numel() and int(kept.min()) < 0:
        raise ValueError(f"a segment has fewer rows than its padding, {before + behind}")
    return taken(x, places((sizes.cumsum(0) - sizes) + before, kept)), kept


@operator("GatherPadding", outputs=(1, 2), expected="N *, M")
def gather_padding(
    x: Tensor,
    lengths: Tensor | None = None,
    *,
    context: Context,
    padding_width: int = 1,
    end_padding_width: int = -1,
) -> tuple[Tensor, ...]:
    """Return the sums of the padding at starts and ends; a single output has both."""
    before, behind = _widths(padding_width, end_padding_width)
    sizes = _lengths(x, lengths)
    ends = sizes.cumsum(0)
    first, last = x[_span(ends - sizes, before)].sum(0), x[_span(ends - behind, behind)].sum(0)
    return (first, last) if context.outputs == 2 else (first + last,)


@operator("PadEmptySamples", inputs=(1, ANY), expected="M")
def pad_empty_samples(lengths: Tensor, *features: Any) -> tuple[Any, ...]:
    """Return lengths with 1 for 0, and features with a zero row (or empty string) for these."""
    padded = lengths.clamp(min=1)
    rows = torch.repeat_interleave(lengths > 0, padded.long())
    count = int(lengths.sum())
    made: list[Any] = [padded]
    for feature in features:
        if feature.ndim < 1 or len(feature) != count:
            raise ValueError(f"a feature has the shape {tuple(feature.shape)}, not ({count}, ...)")
        if isinstance(feature, np.ndarray):
            wide: Any = np.full((len(rows), *feature.shape[1:]), b"", dtype=object)
            wide[rows.numpy()] = feature
        else:
            wide = feature.new_zeros(len(rows), *feature.shape[1:])
            wide[rows] = feature
        made.append(wide)
    return tuple(made)


@operator("LengthsPad", gradient=NO_GRADIENT, expected="N *, M")
def lengths_pad(
    x: Tensor, lengths: Tensor, *, padding_value: float = -1.0, target_length: int
) -> Tensor:
    """Return the segments of x, each filled with a value to one length.

    Raises:
        ValueError: a segment is longer.
    """
    made = torch.full((len(lengths) * target_length, *x.shape[1:]), padding_value, dtype=x.dtype)
    made = made.to(x.device)
    if x.is_meta:
        return made
    if lengths.numel() and int(lengths.max()) > target_length:
        raise ValueError(f"a segment of {int(lengths.max())} rows is longer than {target_length}")
    starts = torch.arange(len(lengths), device=x.device) * target_length
    ids_of(lengths, x.shape[0])
    made[places(starts, lengths)] = x
    return made


@operator("LengthsSplit", expected="N, one")
def lengths_split(lengths: Tensor, parts: Tensor | None = None, *, n_split: int = -1) -> Tensor:
    """Return each length as `n_split` lengths, equal but for the first ones, which have 1 more.

    Raises:
        ValueError: the number of parts is missing or below 1.
    """
    count = n_split if parts is None else int(parts.item())
    if count < 1:
        raise ValueError(f"LengthsSplit needs n_split of at least 1, not {count}")
    shares = torch.arange(count - 1, -1, -1, device=lengths.device)
    made = torch.div(lengths[:, None] + shares, count, rounding_mode="floor")
    return made.reshape(-1).to(lengths.dtype)


@operator("RemoveDataBlocks", expected="N *, ?")
def remove_data_blocks(x: Tensor, indices: Tensor) -> Tensor:
    """Return x without the rows that the indices name."""
    kept = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    kept[indices.long()] = False
    return x[kept]


@operator("PackRNNSequence", gradient="UnpackRNNSequence(GO0, I1) -> GI0", expected="N *, M")
def pack_rnn_sequence(x: Tensor, lengths: Tensor) -> Tensor:
    """Return consecutive sequences as a tensor (longest, sequences, ...), zeros behind each."""
    longest = int(lengths.max()) if lengths.numel() else 0
    made = x.new_zeros(longest, len(lengths), *x.shape[1:])
    ids = ids_of(lengths, x.shape[0])
    made[torch.arange(len(ids), device=x.device) - (lengths.cumsum(0) - lengths)[ids], ids] = x
    return made


@operator("UnpackRNNSequence", gradient="PackRNNSequence(GO0, I1) -> GI0", expected="T M *, M")
def unpack_rnn_sequence(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the sequences of a tensor (longest, sequences, ...), one behind the other."""
    ids = ids_of(lengths)
    return x[torch.arange(len(ids), device=x.device) - (lengths.cumsum(0) - lengths)[ids], ids]


@operator("VariableLengthSequencePadding", expected="T N *, N")
def variable_length_sequence_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Return a tensor (steps, sequences, ...) with zeros behind the length of each sequence."""
    inside = torch.arange(x.shape[0], device=x.device)[:, None] < lengths
    return torch.where(inside.reshape(inside.shape + (1,) * (x.dim() - 2)), x, 0)
