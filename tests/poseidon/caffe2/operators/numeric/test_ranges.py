"""Fillers of ranges, diagonals and distinct values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import run


@pytest.mark.parametrize("limits", [[5], [2, 6], [2, 9, 3], [5, 0, -2], [3, 1], [0.5, 2, 0.5]])
def test_range(limits: list[float]) -> None:
    dtype = np.int32 if all(isinstance(limit, int) for limit in limits) else np.float32
    (y,) = run("Range", [np.array([limit], dtype) for limit in limits])
    np.testing.assert_allclose(y, np.arange(*limits, dtype=dtype))
    assert y.dtype == dtype


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("RangeFill", {"shape": [2, 2]}, [[0, 1], [2, 3]]),
        ("DiagonalFill", {"shape": [2, 3], "value": 2.0}, [[2, 0, 0], [0, 2, 0]]),
        ("Float16ConstantFill", {"shape": [2], "value": 1.5}, [1.5, 1.5]),
    ],
)
def test_values(kind: str, arguments: dict[str, Any], expected: Any) -> None:
    np.testing.assert_array_equal(run(kind, [], **arguments)[0], expected)


def test_distinct_values() -> None:
    (y,) = run("UniqueUniformFill", [], shape=[2, 5], min=3, max=12)
    assert sorted(y.reshape(-1).tolist()) == list(range(3, 13))
    (y,) = run("UniqueUniformFill", [np.zeros(4, "f4"), np.array([4, 5])], min=3, max=8)
    assert sorted(y.tolist()) == [3, 6, 7, 8]
    with pytest.raises(RuntimeError, match="5 different values"):
        run("UniqueUniformFill", [], shape=[5], min=0, max=3)


def test_half_precision_in_bounds() -> None:
    (y,) = run("Float16UniformFill", [], shape=[100], min=2.0, max=3.0)
    assert y.dtype == np.float16
    assert 2 <= y.min() < y.max() <= 3
