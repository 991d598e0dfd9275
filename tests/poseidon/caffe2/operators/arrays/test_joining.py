"""Concat and Split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run

X = numbers(2, 6, 4, 3)


@pytest.mark.parametrize(
    ("arguments", "axis"), [({}, 1), ({"order": "NHWC"}, 3), ({"axis": 0}, 0), ({"axis": -2}, 2)]
)
def test_concat_and_split_are_inverse(arguments: dict[str, Any], axis: int) -> None:
    parts = [X.take(range(1), axis), X.take(range(1, X.shape[axis]), axis)]
    joined, sizes = run("Concat", parts, 2, **arguments)
    np.testing.assert_array_equal(joined, X)
    assert sizes.tolist() == [1, X.shape[axis] - 1]
    assert sizes.dtype == np.int32
    assert_gradients("Concat", parts, [0, 1], 2, (0,), **arguments)
    for inputs, more in (([X, sizes], {}), ([X], {"split": sizes.tolist()})):
        for made, expected in zip(run("Split", inputs, 2, **arguments, **more), parts, strict=True):
            np.testing.assert_array_equal(made, expected)
        assert_gradients("Split", inputs, [0], 2, (0, 1), **arguments, **more)


def test_concat_with_a_new_axis() -> None:
    x = numbers(3, 4)
    for axis in (0, 1, 2, -1):
        np.testing.assert_array_equal(
            run("Concat", [x, x + 1], 2, axis=axis, add_axis=1)[0], np.stack([x, x + 1], axis)
        )
        assert_gradients("Concat", [x, x + 1], [0, 1], 2, (0,), axis=axis, add_axis=1)


def test_equal_parts() -> None:
    for made, expected in zip(run("Split", [X], 3), np.split(X, 3, 1), strict=True):
        np.testing.assert_array_equal(made, expected)
    with pytest.raises(RuntimeError, match="6 values cannot be split into 4 equal parts"):
        run("Split", [X], 4)


def test_strings_are_joined() -> None:
    a = np.array([b"a", b"b"], dtype=object)
    assert run("Concat", [a, a[:1]], 2, axis=0)[0].tolist() == [b"a", b"b", b"a"]
