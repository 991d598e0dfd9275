"""Lists of ids by example: dense and sparse forms, merging, splitting, hashing."""

from __future__ import annotations

import torch
from torch import Tensor

from poseidon.caffe2.operators.registry import NO_GRADIENT, Context, operator
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
    """Return a row for each example with its values at their indices, and a default value
    elsewhere.

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
    dense = torch.full(
        (len(lengths), width), default_value, dtype=values.dtype, device=values.device
    )
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
    """Return the lengths and values of lists in which each example has the values of all its
    lists, each once.

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
    found = (
        torch.nonzero(flat == key).reshape(-1).to(torch.int32) for key in range(categorical_limit)
    )
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
