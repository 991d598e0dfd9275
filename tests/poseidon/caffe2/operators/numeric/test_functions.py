"""Functions of single elements: values by numpy, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poseidon.caffe2 import core, workspace
from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(3, 4)
INSIDE = (X / (1 + np.abs(X).max())).astype("f4")
POSITIVE = (np.abs(X) + 0.5).astype("f4")


@pytest.mark.parametrize(("follow", "expected"), [(False, [-1, 1, -1]), (True, [2, 1, 2])])
def test_the_sign_of_a_remainder(follow: bool, expected: list[int]) -> None:
    x = np.array([-4, 4, -1], dtype=np.int64)
    (y,) = run("Mod", [x], divisor=3, sign_follow_divisor=follow)
    np.testing.assert_array_equal(y, expected)
    assert y.dtype == np.int64


def test_a_divisor_of_zero_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="divisor must not be 0"):
        run("Mod", [np.array([1])], divisor=0)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [((3, 4), {}), ((4,), {"broadcast": 1}), ((3,), {"broadcast": 1, "axis": 0})],
)
def test_the_gradients_of_a_power_of_two_inputs(
    shape: tuple[int, ...], arguments: dict[str, int]
) -> None:
    exponents = np.linspace(0.5, 2, int(np.prod(shape))).reshape(shape).astype("f4")
    fitted = exponents[:, None] if arguments.get("axis") == 0 else exponents
    assert_run("Pow", [POSITIVE, exponents], POSITIVE**fitted, rtol=1e-5, **arguments)
    assert_gradients("Pow", [POSITIVE, exponents], [0, 1], **arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("kind", "outputs"), [("NanCheck", 1), ("EnforceFinite", 0)])
def test_a_value_that_is_not_finite_is_an_error(kind: str, outputs: int, bad: float) -> None:
    with pytest.raises(RuntimeError, match="Index 1 is not finite"):
        run(kind, [np.array([0, bad], "f4")], outputs)


@pytest.mark.parametrize("to", [core.DataType.INT32, "int32"])
def test_a_cast_cuts_fractions_off(to: int | str) -> None:
    (y,) = run("Cast", [np.array([1.7, -1.7], "f4")], to=to)
    assert y.dtype == np.int32
    assert y.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.array([[7, -12], [0, 2**31 - 1]], np.int32), [[b"7", b"-12"], [b"0", b"2147483647"]]),
        (np.array([200, 3], np.uint8), [b"200", b"3"]),
        (np.array([True, False]), [b"1", b"0"]),
        (np.array([0.5, -2e-7, np.inf], "f4"), [b"0.500000", b"-0.000000", b"inf"]),
        (np.zeros((0, 2), np.int64), []),
    ],
)
def test_a_cast_to_strings(x: Array, expected: list[Any]) -> None:
    (y,) = run("Cast", [x], to=core.DataType.STRING)
    assert y.shape == x.shape
    assert y.tolist() == expected


def test_strings_are_not_cast() -> None:
    with pytest.raises(RuntimeError, match="a tensor of strings cannot be cast"):
        run("Cast", [np.array([b"7"], dtype=object)], to=core.DataType.INT32)


def test_the_gradient_of_a_cast_goes_back() -> None:
    net = core.Net("cast")
    net.Cast("x", "y", to=core.DataType.FLOAT, from_type=core.DataType.DOUBLE)
    workspace.FeedBlob("x", np.ones(2))
    gradients = net.AddGradientOperators(["y"])
    workspace.RunNetOnce(net)
    assert workspace.FetchBlob(gradients["x"]).dtype == np.float64


@pytest.mark.parametrize("in_place", [None, {0: 0, 1: 1}])
def test_several_blobs_are_scaled_at_once(in_place: dict[int, int] | None) -> None:
    blobs = [X, numbers(1, 5), numbers(0, 2)]
    made = run("ScaleBlobs", blobs, 3, in_place, scale=-2.5)
    for x, y in zip(blobs, made, strict=True):
        np.testing.assert_array_equal(y, run("Scale", [x], scale=-2.5)[0])


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
    assert_run(kind, [A, B[:, 0]], expected(A, B[:, :1]), broadcast=1, axis=0)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_one_value_that_is_broadcast_adds_no_axes(shape: tuple[int, ...]) -> None:
    a = np.full(shape, 6, "f4")
    assert_run("Div", [a, np.full((1, 1), 2, "f4")], np.full(shape, 3, "f4"), broadcast=1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1), (2, 2)])
def test_the_first_operand_is_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"shape \[1, 3\] of the second operand is not a part"):
        run("Add", [np.ones(shape, "f4"), np.ones((1, 3), "f4")], broadcast=1)


@pytest.mark.parametrize(("kind", "expected"), [("And", 8), ("Or", 14), ("Xor", 6)])
def test_bits(kind: str, expected: int) -> None:
    a, b = np.array([12], dtype=np.int32), np.array([10], dtype=np.int32)
    assert run(f"Bitwise{kind}", [a, b])[0].tolist() == [expected]


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


def test_division_by_a_root() -> None:
    x, scale = numbers(3, 2), np.array([4, 0, 1], dtype=np.int32)
    assert_run("SquareRootDivide", [x, scale], x / np.array([[2], [1], [1]]), rtol=1e-6)
    assert_gradients("SquareRootDivide", [x, scale], [0])


def test_a_leaky_unit_passes_the_gradient_at_zero() -> None:
    y, dy = np.array([-1, 0, 1], "f4"), np.array([2, 2, 2], "f4")
    assert_run("LeakyReluGradient", [y, dy], np.array([1, 2, 2], "f4"), alpha=0.5)
