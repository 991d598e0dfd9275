"""Strategies of arrays, segments and lengths for hypothesis, under the names that Caffe2's tests
use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np


def dims(min_value: int = 1, max_value: int = 5) -> Any:
    """Return a strategy of sizes."""
    return st.integers(min_value=min_value, max_value=max_value)


def elements_of_type(dtype: Any = np.float32, filter_: Callable[[Any], bool] | None = None) -> Any:
    """Return a strategy of values of a type; floats are between -1 and 1.

    Raises:
        ValueError: there is none for the type.
    """
    elements: Any
    if dtype in (np.float16, np.float32, np.float64):
        width: Any = {np.float16: 16, np.float32: 32, np.float64: 64}[dtype]
        elements = st.floats(min_value=-1.0, max_value=1.0, width=width, allow_subnormal=False)
    elif dtype is np.int32:
        elements = st.integers(min_value=0, max_value=2**31 - 1)
    elif dtype is np.int64:
        elements = st.integers(min_value=0, max_value=2**63 - 1)
    elif dtype in (bool, np.bool_):
        elements = st.booleans()
    else:
        raise ValueError(f"Unexpected dtype without elements provided: {dtype}")
    return elements if filter_ is None else elements.filter(filter_)


def floats(
    min_value: float | None = None, max_value: float | None = None, width: Any = 32, **kwargs: Any
) -> Any:
    """Return a strategy of floats of a width in bits; limits that the width cannot hold are
    rounded inwards.
    """
    bound: Any = {16: np.float16, 32: np.float32, 64: np.float64}[width]
    if min_value is not None:
        least = bound(min_value)
        min_value = float(
            least if float(least) >= min_value else np.nextafter(least, bound(np.inf))
        )
    if max_value is not None:
        most = bound(max_value)
        max_value = float(most if float(most) <= max_value else np.nextafter(most, bound(-np.inf)))
    return st.floats(min_value, max_value, width=width, **kwargs)


def arrays(dims: Any, dtype: Any = np.float32, elements: Any = None, unique: bool = False) -> Any:
    """Return a strategy of arrays of a shape."""
    return hypothesis.extra.numpy.arrays(
        dtype,
        dims,
        elements=elements_of_type(dtype) if elements is None else elements,
        unique=unique,
    )


def tensor(
    min_dim: int = 1, max_dim: int = 4, dtype: Any = np.float32, elements: Any = None, **kwargs: Any
) -> Any:
    """Return a strategy of tensors of so many dimensions."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(lambda shape: arrays(tuple(shape), dtype, elements))


def tensor1d(
    min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Any = None
) -> Any:
    """Return a strategy of vectors."""
    return tensor(1, 1, dtype, elements, min_value=min_len, max_value=max_len)


def segment_ids(size: int, is_sorted: bool) -> Any:
    """Return a strategy of the segment of each of `size` rows."""
    if size == 0:
        return st.just(np.empty(0, dtype=np.int32))
    if is_sorted:
        steps = arrays([size], dtype=np.int32, elements=st.booleans())
        return steps.map(lambda each: np.cumsum(each, dtype=np.int32) - each[0])
    return arrays([size], dtype=np.int32, elements=st.integers(min_value=0, max_value=2 * size))


def lengths(
    size: int, min_segments: int | None = None, max_segments: int | None = None, **kwargs: Any
) -> Any:
    """Return a strategy of lengths of segments that are `size` together."""
    least = 0 if min_segments is None else min_segments
    most = size if max_segments is None else max_segments
    assert 0 <= least <= most
    if size == 0 and most == 0:
        return st.just(np.empty(0, dtype=np.int32))
    assert most > 0, "size is not 0: at least one segment is needed"
    borders = st.integers(min_value=max(least - 1, 0), max_value=most - 1).flatmap(
        lambda count: st.lists(st.integers(0, size), min_size=count, max_size=count)
    )
    return borders.map(lambda cuts: np.diff([0, *sorted(cuts), size]).astype(np.int32))


def segmented_tensor(
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    is_sorted: bool = True,
    elements: Any = None,
    segment_generator: Any = segment_ids,
    allow_empty: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a strategy of tensors and of their segments."""
    sizes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    empty = st.booleans() if allow_empty else st.just(False)
    shapes = st.tuples(empty, sizes).map(lambda pair: ([0] if pair[0] else []) + pair[1])
    return shapes.flatmap(
        lambda shape: st.tuples(
            arrays(tuple(shape), dtype, elements), segment_generator(shape[0], is_sorted=is_sorted)
        )
    )


def lengths_tensor(
    min_segments: int | None = None, max_segments: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Return a strategy of tensors and of the lengths of their segments."""
    generator = functools.partial(lengths, min_segments=min_segments, max_segments=max_segments)
    return segmented_tensor(*args, segment_generator=generator, **kwargs)  # type: ignore[misc]


def sparse_segmented_tensor(
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    is_sorted: bool = True,
    elements: Any = None,
    allow_empty: bool = False,
    segment_generator: Any = segment_ids,
    itype: Any = np.int64,
    **kwargs: Any,
) -> Any:
    """Return a strategy of tensors, of indices into them, and of the segments of the indices."""
    sizes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    empty = st.booleans() if allow_empty else st.just(False)
    shapes = st.tuples(empty, sizes).flatmap(
        lambda pair: st.tuples(
            st.just(pair[1]),
            st.just(0) if pair[0] else st.integers(min_value=1, max_value=pair[1][0]),
        )
    )
    return shapes.flatmap(
        lambda parts: st.tuples(
            arrays(tuple(parts[0]), dtype, elements),
            arrays([parts[1]], itype, st.integers(min_value=0, max_value=parts[0][0] - 1)),
            segment_generator(parts[1], is_sorted=is_sorted),
        )
    )


def sparse_lengths_tensor(**kwargs: Any) -> Any:
    """Return a strategy of tensors, of indices into them, and of the lengths of the segments of
    the indices.
    """
    return sparse_segmented_tensor(segment_generator=lengths, **kwargs)


def tensors(
    n: int,
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    elements: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a strategy of lists of n tensors of one shape."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(
        lambda shape: st.lists(arrays(tuple(shape), dtype, elements), min_size=n, max_size=n)
    )


def tensors1d(
    n: int, min_len: int = 1, max_len: int = 64, dtype: Any = np.float32, elements: Any = None
) -> Any:
    """Return a strategy of lists of n vectors of one length."""
    return tensors(n, 1, 1, dtype, elements, min_value=min_len, max_value=max_len)


def ntensors(
    min_n: int,
    max_n: int,
    min_dim: int = 1,
    max_dim: int = 4,
    dtype: Any = np.float32,
    elements: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a strategy of lists of `min_n` to `max_n` tensors of one shape."""
    shapes = st.lists(dims(**kwargs), min_size=min_dim, max_size=max_dim)
    return shapes.flatmap(
        lambda shape: st.lists(
            arrays(tuple(shape), dtype, elements), min_size=min_n, max_size=max_n
        )
    )
