"""Comparisons, logic, choices, Max, Min, Mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run

A = np.array([[1, 2, 3], [3, 2, 1]], dtype=np.int32)
B = np.array([[1, 3, 2], [2, 2, 2]], dtype=np.int32)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("LT", np.less),
        ("LE", np.less_equal),
        ("GT", np.greater),
        ("GE", np.greater_equal),
        ("EQ", np.equal),
        ("NE", np.not_equal),
    ],
)
def test_comparisons_with_both_ways_of_broadcasting(
    kind: str, expected: Callable[..., Any]
) -> None:
    np.testing.assert_array_equal(run(kind, [A, B])[0], expected(A, B))
    np.testing.assert_array_equal(run(kind, [A, B[0]], broadcast=1)[0], expected(A, B[0]))
    np.testing.assert_array_equal(
        run(kind, [A, B[:, 0]], broadcast=1, axis=0)[0], expected(A, B[:, :1])
    )


@pytest.mark.parametrize(
    ("kind", "expected"), [("And", [0, 0, 0, 1]), ("Or", [0, 1, 1, 1]), ("Xor", [0, 1, 1, 0])]
)
def test_logic(kind: str, expected: list[int]) -> None:
    a, b = np.array([0, 0, 1, 1], dtype=bool), np.array([0, 1, 0, 1], dtype=bool)
    np.testing.assert_array_equal(run(kind, [a, b])[0], np.array(expected, dtype=bool))


@pytest.mark.parametrize(("kind", "expected"), [("And", 8), ("Or", 14), ("Xor", 6)])
def test_bits(kind: str, expected: int) -> None:
    a, b = np.array([12], dtype=np.int32), np.array([10], dtype=np.int32)
    assert run(f"Bitwise{kind}", [a, b])[0].tolist() == [expected]


def test_not() -> None:
    assert run("Not", [np.array([True, False])])[0].tolist() == [False, True]


@pytest.mark.parametrize("rows", [False, True])
def test_where(rows: bool) -> None:
    condition = np.array([True, False]) if rows else A > 1
    expected = np.where(condition[:, None] if rows else condition, A, B)
    np.testing.assert_array_equal(
        run("Where", [condition, A, B], broadcast_on_rows=int(rows))[0], expected
    )


@pytest.mark.parametrize(
    ("x", "value", "expected"),
    [
        (np.array([1, 2, 5]), [1, 5], [True, False, True]),
        (np.array([b"a", b"b"], dtype=object), ["b", "c"], [False, True]),
        (np.array([True, False]), [True], [True, False]),
    ],
)
def test_members(x: Any, value: list[Any], expected: list[bool]) -> None:
    assert run("IsMemberOf", [x], value=value)[0].tolist() == expected


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [((4, 5), {}), ((3,), {"axis": 1}), ((), {}), ((3, 4), {"axis": 1}), ((3,), {"axis_str": "C"})],
)
def test_sums_to_a_shape(shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    x = numbers(2, 3, 4, 5)
    begin = 1 if arguments else 4 - len(shape)
    kept = range(begin, begin + len(shape))
    expected = x.sum(tuple(axis for axis in range(4) if axis not in kept))
    (y,) = run("SumReduceLike", [x, np.zeros(shape, "f4")], broadcast=1, **arguments)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("Max", np.maximum), ("Min", np.minimum), ("Mean", lambda a, b: (a + b) / 2)],
)
def test_several_inputs(kind: str, expected: Callable[..., Any]) -> None:
    a, b = numbers(3, 4), numbers(3, 4, seed=1)
    np.testing.assert_allclose(run(kind, [a, b])[0], expected(a, b), rtol=1e-5)
    np.testing.assert_allclose(run(kind, [a])[0], a)
    assert_gradients(kind, [a, b], [0, 1])


def test_division_by_a_root() -> None:
    x, scale = numbers(3, 2), np.array([4, 0, 1], dtype=np.int32)
    (y,) = run("SquareRootDivide", [x, scale])
    np.testing.assert_allclose(y, x / np.array([[2], [1], [1]]), rtol=1e-6)
    assert_gradients("SquareRootDivide", [x, scale], [0])
