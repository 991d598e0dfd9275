"""Arrays of reference functions: one element is a number, a list of slices is an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_testing.references import ReferenceArray, as_reference_arrays

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def assigned(one: Any) -> Any:
    table = np.zeros(3, np.float32)
    table[1] = np.float32(2) + 3 * one
    return table


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda x: float(x[1:, 1]), 4.0),
        (lambda x: int(x[1:, 1]), 4),
        (lambda x: assigned(x[0, 1:2]), [0, 5, 0]),
        (lambda x: assigned((x[:1, 1] / 2).astype(np.float32)), [0, 3.5, 0]),
        (lambda x: x[[slice(None), slice(0, 2)]], X[:, :2]),
        (lambda x: x[[1, 0]], X[::-1]),
        (lambda x: x[1], X[1]),
    ],
)
def test_what_numpy_gave_up(use: Callable[[Any], Any], expected: Any) -> None:
    (x,) = as_reference_arrays([X])
    np.testing.assert_array_equal(use(x), expected)


@pytest.mark.parametrize("use", [np.sum, np.mean, lambda x: x.max(), lambda x: x[0] @ x[1]])
def test_a_number_is_a_plain_number(use: Callable[[Any], Any]) -> None:
    (x,) = as_reference_arrays([X])
    assert type(use(x)) is type(use(X))
    assert use(x) == use(X)


def test_several_elements_are_no_number() -> None:
    (x,) = as_reference_arrays([X])
    with pytest.raises(ValueError, match="size 1"):
        float(x)


def test_only_arrays_change_and_share_their_memory() -> None:
    x, flag, nothing = as_reference_arrays([X, True, None])
    assert isinstance(x, ReferenceArray) and np.shares_memory(x, X)
    assert flag is True and nothing is None
