"""Lengths, segment ids and ranges; packing of segments; fillers and tiles by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.caffe2.operators.arrays.gather import taken
from poseidon.caffe2.operators.gradients import GradientMaker
from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
from poseidon.caffe2.operators.sparse.segments import ids_of
from poseidon.errors import counted


@operator("LengthsTile", gradient="LengthsSum(GO0, I1) -> GI0", expected="M *, M")
def lengths_tile(x: Any, lengths: Tensor) -> Any:
    """Return each row of x as often as its length says."""
    return taken(x, ids_of(lengths))


@operator("LengthsToSegmentIds", expected="N")
def lengths_to_segment_ids(lengths: Tensor) -> Tensor:
    """Return the segment of each row, int32."""
    return ids_of(lengths).to(torch.int32)


def _ranges(lengths: Tensor) -> Tensor:
    return torch.stack([lengths.cumsum(0) - lengths, lengths], 1).to(torch.int32)


@operator("LengthsToRanges", expected="N")
def lengths_to_ranges(lengths: Tensor) -> Tensor:
    """Return (start, length) of each segment, int32."""
    return _ranges(lengths)


@operator("LengthsToOffsets", expected="N")
def lengths_to_offsets(lengths: Tensor, *, include_last_offset: bool = False) -> Tensor:
    """Return each segment's start, int32; `include_last_offset` adds the end of the last."""
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return (ends if include_last_offset else ends[:-1]).to(torch.int32)


@operator("LengthsToWeights", expected="N")
def lengths_to_weights(lengths: Tensor, *, power: float = 0.5) -> Tensor:
    """Return 1 / length^power for each row."""
    rows = lengths.to(torch.float32)[ids_of(lengths)]
    return rows.pow(-power)


@operator("LengthsRangeFill", gradient=NO_GRADIENT, expected="N")
def lengths_range_fill(lengths: Tensor) -> Tensor:
    """Return the place of each row in its segment, int32."""
    starts = (lengths.cumsum(0) - lengths)[ids_of(lengths)]
    return (torch.arange(len(starts), device=lengths.device) - starts).to(torch.int32)


def _segment_lengths(ids: Tensor, like: Any) -> Tensor:
    count = int(ids.max()) + 1 if ids.numel() else 0
    return torch.bincount(ids.long(), minlength=count if like is None else len(like))


@operator("SegmentIdsToLengths", expected="N, M *")
def segment_ids_to_lengths(ids: Tensor, like: Any = None) -> Tensor:
    """Return the number of rows of each id, int32; there are as many ids as `like` has rows."""
    return _segment_lengths(ids, like).to(torch.int32)


@operator("SegmentIdsToRanges", expected="N, M *")
def segment_ids_to_ranges(ids: Tensor, like: Any = None) -> Tensor:
    """Return (start, length) of each id, int32; both are 0 behind the last id."""
    ranges = _ranges(_segment_lengths(ids, like))
    ranges[int(ids[-1]) + 1 if len(ids) else 0 :] = 0
    return ranges


@operator("PackSegments", gradient="UnpackSegments(I0, GO0) -> GI1", expected="M, N *")
def pack_segments(
    lengths: Tensor,
    x: Any,
    *,
    pad_minf: bool = False,
    max_length: int = -1,
    return_presence_mask: bool = False,
) -> tuple[Any, Tensor]:
    """Return segments as rows of equal length, filled with zeros, and where they have values.

    Args:
        lengths: the number of rows of x of each segment.
        x: numbers or strings; the rows of all segments, one behind the other.
        pad_minf: whether the rest is filled with -inf in the place of 0.
        max_length: the length of the rows; by default the longest segment's. Longer ones are cut.
        return_presence_mask: whether there is a second output.
    """
    width = max_length if max_length >= 0 else int(lengths.max()) if lengths.numel() else 0
    place = torch.arange(width, device=lengths.device)
    present = place < lengths[:, None]
    rows = ((lengths.cumsum(0) - lengths)[:, None] + place)[present]
    if isinstance(x, np.ndarray):
        packed: Any = np.full((*present.shape, *x.shape[1:]), b"", dtype=object)
        packed[present.numpy()] = x[rows.numpy()]
    else:
        filling = float("-inf") if pad_minf else 0
        packed = torch.full((*present.shape, *x.shape[1:]), filling, dtype=x.dtype, device=x.device)
        packed[present] = x[rows.long()]
    return packed, present


@operator("UnpackSegments", gradient="PackSegments(I0, GO0) -> GI1", expected="M, M T *")
def unpack_segments(lengths: Tensor, x: Any, *, max_length: int = -1) -> Any:
    """Return the rows of packed segments, in a sequence; those that were cut off are 0."""
    width = x.shape[1] if x.ndim > 1 else 0
    ids = ids_of(lengths)
    place = torch.arange(len(ids), device=lengths.device) - (lengths.cumsum(0) - lengths)[ids]
    kept = place < width
    if isinstance(x, np.ndarray):
        return x[ids.numpy(), place.numpy()]
    rows = x.new_zeros(len(ids), *x.shape[2:])
    rows[kept] = x[ids[kept], place[kept]]
    return rows


@operator("ReversePackedSegs", gradient="ReversePackedSegs(GO0, I1) -> GI0", expected="T N D, N")
def reverse_packed_segs(x: Tensor, lengths: Tensor) -> Tensor:
    """Return packed segments (longest, segments, values) backwards; what is behind stays."""
    place = torch.arange(len(x), device=x.device)[:, None]
    source = torch.where(place < lengths, lengths - 1 - place, place)
    return x.gather(0, source.unsqueeze(-1).expand(x.shape).long())


def _check_like_keys(keys: Tensor, others: Sequence[Tensor]) -> None:
    """Raise ValueError for an input whose first dimensions differ from the keys' shape."""
    for value in others:
        if value.shape[: keys.dim()] != keys.shape:
            wanted = ", ".join([*map(str, keys.shape), "..."])
            raise ValueError(f"an input has the shape {tuple(value.shape)}, not ({wanted}) as keys")


def _parts(keys: Tensor, count: int) -> Tensor:
    return torch.remainder(keys, count)


def _partitioned(
    keys: Tensor, others: Sequence[Tensor], count: int, packed: bool, lengths: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return keys and others of each of so many parts, with the segments' lengths if given."""
    part = _parts(keys, count)
    ids = None if lengths is None else ids_of(lengths, len(keys))
    _check_like_keys(keys, others)
    firsts = torch.div(keys, count, rounding_mode="floor") if packed else keys
    made: list[Tensor] = []
    for number in range(count):
        chosen = part == number
        if lengths is not None and ids is not None:
            made.append(torch.bincount(ids[chosen], minlength=len(lengths)).to(lengths.dtype))
        made += [firsts[chosen], *[other[chosen] for other in others]]
    return tuple(made)


@operator("Partition", gradient=NO_GRADIENT)
def partition(
    keys: Tensor, *others: Tensor, context: Context, pack_first_input: bool = False
) -> tuple[Any, ...]:
    """Return all inputs split by their key's remainder: all inputs of part 0, then of 1, ...

    Args:
        keys: integers of any shape.
        others: tensors whose first dimensions are the keys' shape.
        context: its outputs are as many as inputs, for each part.
        pack_first_input: whether keys are divided by the number of parts.
    """
    return _partitioned(keys, others, context.outputs // (1 + len(others)), pack_first_input)


@operator("LengthsPartition", gradient=NO_GRADIENT, expected="M, N")
def lengths_partition(
    lengths: Tensor, keys: Tensor, *others: Tensor, context: Context, pack_first_input: bool = False
) -> tuple[Any, ...]:
    """Return inputs split by their key's remainder, with each part's segments' lengths."""
    count = context.outputs // (2 + len(others))
    return _partitioned(keys, others, count, pack_first_input, lengths)


def _gather_by_key_rule(maker: GradientMaker) -> None:
    gradients = [maker.GI(index) for index in range(1, len(maker.forward.input))]
    outputs = [name for dx in gradients for name in (f"_{dx}_keys", dx)]
    packed = {"pack_first_input": maker.argument("pack_first_input", 0)}
    maker.op("Partition", [maker.I(0), maker.GO(0)], outputs, packed, copy=True)


@operator("GatherByKey", gradient=_gather_by_key_rule)
def gather_by_key(keys: Tensor, *parts: Tensor) -> Tensor:
    """Return the values of all keys from parts that were split by the remainder of their key."""
    number = _parts(keys, len(parts)).reshape(-1)
    if not parts[0].dim():
        raise ValueError("the part 0 has no dimensions, expected a row for each of its keys")
    made = parts[0].new_zeros(keys.numel(), *parts[0].shape[1:])
    for index, part in enumerate(parts):
        chosen = number == index
        if part.shape != (int(chosen.sum()), *made.shape[1:]):
            raise ValueError(
                f"the part {index} has the shape {tuple(part.shape)}, expected a row for each of "
                f"its {counted(int(chosen.sum()), 'key')}"
            )
        made[chosen] = part
    return made.reshape(*keys.shape, *parts[0].shape[1:])
