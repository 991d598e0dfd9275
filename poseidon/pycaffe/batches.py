"""Cutting what a user gives into a net's batches, and putting the outputs together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import UsageError

Array = NDArray[Any]


def count_of(arrays: Mapping[str, Array]) -> int:
    """How many records each array has.

    Raises:
        UsageError: there is no array, or they differ.
    """
    counts = {len(array) for array in arrays.values()}
    if len(counts) != 1:
        found = ", ".join(f"{name} {len(array)}" for name, array in arrays.items()) or "nothing"
        raise UsageError(f"expected arrays of equally many records, found {found}")
    return counts.pop()


def batches(arrays: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    """Cut arrays along their first axis; the last batch is filled up with zeros."""
    count = count_of(arrays)
    for start in range(0, count, size):
        batch = {name: np.asarray(array[start : start + size]) for name, array in arrays.items()}
        lacking = start + size - count
        if lacking > 0:
            batch = {name: _padded(array, lacking) for name, array in batch.items()}
        yield batch


def joined(parts: Mapping[str, Iterable[Array]], count: int | None) -> dict[str, Array]:
    """Rows of all batches as one array each, at most `count` of them: what was filled up is dropped."""
    return {name: np.asarray(list(rows))[:count] for name, rows in parts.items()}


def _padded(array: Array, lacking: int) -> Array:
    return np.concatenate([array, np.zeros((lacking, *array.shape[1:]), array.dtype)])
