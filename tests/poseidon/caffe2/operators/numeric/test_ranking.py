"""ArgMax, ArgMin, TopK."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run


@pytest.mark.parametrize("limits", [[5], [2, 6], [2, 9, 3], [5, 0, -2], [3, 1], [0.5, 2, 0.5]])
def test_range(limits: list[float]) -> None:
    dtype = np.int32 if all(isinstance(limit, int) for limit in limits) else np.float32
    (y,) = run("Range", [np.array([limit], dtype) for limit in limits])
    np.testing.assert_allclose(y, np.arange(*limits, dtype=dtype))
    assert y.dtype == dtype


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


X = numbers(3, 5, 2)


def test_fewer_values_than_asked_for() -> None:
    values, indices, flat = run("TopK", [np.array([[2, 3]], "f4")], 3, k=3)
    assert (values.tolist(), indices.tolist()) == ([[3, 2, 0]], [[1, 0, -1]])
    assert flat.tolist() == [1, 0, -1]


def test_top_values_of_nothing_have_a_gradient() -> None:
    nothing = np.zeros((2, 0), "f4")
    values, indices = run("TopK", [nothing], 2, k=1)
    (dx,) = run("TopKGradient", [values, indices, nothing])
    assert dx.shape == (2, 0)


def test_an_input_gives_the_number_of_top_values() -> None:
    x, two = np.array([[2, 3, 1]], "f4"), np.array([2], np.int64)
    assert run("TopK", [x, two])[0].tolist() == [[3, 2]]
    assert run("TopK", [x, two], k=1)[0].tolist() == [[3]]  # the argument comes first
    for inputs, reason in (
        ([x], "needs the argument k"),
        ([x, 0 * two], "k is 0, expected 1 or more"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            run("TopK", inputs)


def test_equal_values_keep_their_order() -> None:
    assert run("TopK", [np.zeros((1, 50), "f4")], 2, k=4)[1].tolist() == [[0, 1, 2, 3]]


def test_top_values_of_segments() -> None:
    x, lengths = np.array([3, 1, 2, 5, 4], "f4"), np.array([3, 0, 1, 1], dtype=np.int32)
    values, indices = run("LengthsTopK", [x, lengths], 2, k=2)
    assert values.tolist() == [[3, 2], [0, 0], [5, 0], [4, 0]]
    assert indices.tolist() == [[0, 2], [-1, -1], [0, -1], [0, -1]]
    assert_gradients("LengthsTopK", [x, lengths], [0], 2, (0,), k=2)
