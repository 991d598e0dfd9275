"""Rows that are copied, permuted, drawn at random or collected."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import Context, operator
from poseidon.caffe2.operators.sparse.segments import ids_of
from poseidon.caffe2.operators.system.indexes import Map


@operator(
    "CopyRowsToTensor", gradient="CopyRowsToTensorGradient(GO0) -> GI0", expected="N *S, ?, *S"
)
def copy_rows_to_tensor(x: Tensor, indices: Tensor, row: Tensor) -> Tensor:
    """Return x, whose rows that the indices name become a copy of one row, in place."""
    x[indices.reshape(-1).long()] = row
    return x


@operator("CopyRowsToTensorGradient")
def copy_rows_to_tensor_gradient(dy: Tensor) -> Tensor:
    """Return the gradient of `CopyRowsToTensor`: as in Caffe2, the gradient of its output."""
    return dy.clone()


@operator(
    "BatchPermutation", gradient="BatchPermutationGradient(I1, GO0) -> GI0", expected="N *, N"
)
def batch_permutation(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of x in the order of the indices."""
    return x.index_select(0, indices.long())


@operator("BatchPermutationGradient", expected="N, N *")
def batch_permutation_gradient(indices: Tensor, dy: Tensor) -> Tensor:
    return torch.zeros_like(dy).index_copy(0, indices.long(), dy)


@operator("SampleAs", gradient="SampleAsGradient(I0, I1, GO0) -> GI0", expected="N *, N")
def sample_as(x: Tensor, labels: Tensor) -> Tensor:
    """Return the rows whose labels are above 0, as in Detectron."""
    return x[labels > 0]


@operator("SampleAsGradient", expected="N *, N, M *")
def sample_as_gradient(x: Tensor, labels: Tensor, dy: Tensor) -> Tensor:
    dx = torch.zeros_like(x)
    dx[labels > 0] = dy
    return dx


@operator("WeightedSample", expected="N D, N D")
def weighted_sample(
    weights: Tensor, values: Tensor | None = None, *, context: Context
) -> tuple[Tensor, ...]:
    """Return for each row a column drawn by weight, int32, and its value, shape (rows, 1)."""
    if not weights.numel():
        empty = torch.zeros(0, dtype=torch.int32, device=weights.device)
        return (empty,) if values is None else (empty, values.new_zeros(0))
    if not bool((weights.sum(1) > 0).all()) or bool((weights < 0).any()):
        raise ValueError("the weights of a row are all 0, or one is negative")
    drawn = torch.multinomial(weights, 1, generator=context.generator)
    found = drawn.to(torch.int32)
    return (found,) if values is None else (found, values.gather(1, drawn))


@operator("WeightedMultiSampling", inputs=(1, 2), expected="N, ?")
def weighted_multi_sampling(
    cumulated: Tensor, like: Tensor | None = None, *, context: Context, num_samples: int = 0
) -> Tensor:
    """Return indices drawn by weight, int32.

    Args:
        cumulated: the cumulated sums of the weights.
        like: a tensor with the shape of the result.
        context: its random numbers.
        num_samples: the number of indices, where there is no second input.
    """
    shape = [num_samples] if like is None else like.shape
    if not cumulated.numel():
        return torch.zeros(0, dtype=torch.int32, device=cumulated.device)
    spot = torch.rand(shape, generator=context.generator, device=cumulated.device) * cumulated[-1]
    return torch.searchsorted(cumulated, spot).clamp(max=len(cumulated) - 1).to(torch.int32)


@operator("LastNWindowCollector", inputs=(3, 5), outputs=(2, 3))
def last_n_window_collector(
    kept: Tensor | None,
    cursor: Tensor,
    x: Tensor,
    mutex: Any = None,
    visited: Tensor | None = None,
    *,
    num_to_collect: int,
) -> tuple[Any, ...]:
    """Return the last rows given, the place of the next one, and the number of rows so far.

    The rows lie in a ring: a new one takes the place of the oldest.

    Args:
        kept: the rows so far; at first an empty blob or tensor.
        cursor: the place of the next row, an integer.
        x: the new rows.
        mutex: held meanwhile.
        visited: the number of rows so far.
        num_to_collect: how many are kept.
    """
    with threading.Lock() if mutex is None else mutex:
        place, count = int(cursor.reshape(-1)[0]) if cursor.numel() else 0, len(x)
        ring = x.new_zeros(0, *x.shape[1:])
        if kept is not None and kept.numel() and kept.shape[1:] == x.shape[1:]:
            ring = kept
        size = min(len(ring) + count, num_to_collect)
        made = x.new_zeros(size, *x.shape[1:])
        made[: len(ring)] = ring
        last = min(count, num_to_collect)
        spots = (place + torch.arange(count - last, count, device=x.device)) % num_to_collect
        made[spots] = x[count - last :]
        next_ = torch.full_like(cursor, (place + count) % num_to_collect)
        return (made, next_) if visited is None else (made, next_, visited + count)


@operator("ReservoirSampling", inputs=(4, 7), outputs=(2, 4))
def reservoir_sampling(
    kept: Tensor | None,
    visited: Tensor,
    x: Tensor,
    mutex: Any,
    ids: Tensor | None = None,
    places: Map | None = None,
    owners: Tensor | None = None,
    *,
    num_to_collect: int,
    context: Context,
) -> tuple[Any, ...]:
    """Return a sample of all rows given, each with the same probability, and the rows' number.

    With ids each object is in the sample once: rows of objects that are there, or came before in x,
    do not count. Then the places by id and the ids by place are returned too. Outputs are the blobs
    of their inputs.

    Args:
        kept: the sample so far; an empty blob or tensor begins a new one.
        visited: the number of rows so far.
        x: the new rows.
        mutex: held meanwhile.
        ids: the object of each row, int64.
        places: the place of each object of the sample, a map.
        owners: the object of each place.
        num_to_collect: the size of the sample.
    """
    definition = context.definition
    wanted = [definition.input[place] for place in ((0, 1) if ids is None else (0, 1, 5, 6))]
    if len(definition.input) not in (4, 7) or list(definition.output) != wanted:
        raise ValueError(
            f"ReservoirSampling: the outputs must be the inputs {', '.join(wanted)}, of 4 or 7 "
            "inputs"
        )
    if num_to_collect < 1:
        raise ValueError(f"num_to_collect is {num_to_collect}, expected 1 or more")
    if ids is not None and tuple(ids.shape) != (len(x),):
        raise ValueError(f"the ids have the shape {tuple(ids.shape)}, expected ({len(x)},)")
    with mutex:
        rows = list(kept) if kept is not None and kept.numel() else []
        begins = not rows
        count = 0 if begins else int(visited)
        pairs = {} if begins or places is None else dict(places.pairs)
        objects = [] if begins or owners is None else owners.tolist()
        if rows and rows[0].shape != x.shape[1:]:
            raise ValueError(
                f"the rows have the shape {tuple(x.shape[1:])}, expected {tuple(rows[0].shape)} "
                "as before"
            )
        known = set(pairs)
        for row, name in zip(x, [None] * len(x) if ids is None else ids.tolist(), strict=True):
            if name is not None and name in known:
                continue
            known.add(name)
            place = count
            if count >= num_to_collect:
                place = int(
                    torch.randint(count + 1, (1,), generator=context.generator, device=x.device)
                )
            count += 1
            if place >= num_to_collect:
                continue
            if place < len(rows):
                rows[place] = row
                if name is not None:
                    pairs.pop(objects[place])
                    objects[place] = name
            else:
                rows.append(row)
                objects += [] if name is None else [name]
            if name is not None:
                pairs[name] = place
        made = torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])
        number = torch.full_like(visited, count)
        if places is None or ids is None:
            return made, number
        return (
            made,
            number,
            Map(places.types, pairs),
            torch.tensor(objects, dtype=ids.dtype, device=x.device),
        )


@operator(
    "FlexibleTopK", gradient="FlexibleTopKGradient(I0, I1, GO0, O1) -> GI0", expected="*S D, *S"
)
def flexible_top_k(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest values and their columns, so many as `counts` says; vectors."""
    rows = x.reshape(-1, x.shape[-1])
    values, indices = torch.sort(rows, dim=1, descending=True, stable=True)
    taken = torch.arange(rows.shape[1], device=x.device) < counts.reshape(-1, 1)
    return values[taken], indices[taken]


@operator("FlexibleTopKGradient", expected="*S D, *S, M, M")
def flexible_top_k_gradient(x: Tensor, counts: Tensor, dy: Tensor, indices: Tensor) -> Tensor:
    dx = torch.zeros_like(x).reshape(-1, x.shape[-1])
    dx[ids_of(counts.reshape(-1)), indices] = dy
    return dx.reshape(x.shape)


@operator("ExtendTensor", expected="N *, ?")
def extend_tensor(x: Tensor, indices: Tensor) -> Tensor:
    """Return x with so many rows more, of zeros, that each index is a row."""
    missing = int(indices.max()) + 1 - len(x) if indices.numel() else 0
    return x if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
