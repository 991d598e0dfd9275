"""Functions with parameters of their own against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X = numbers(4, 3)
POWERS, SHIFTS = np.array([0, 0.5, 2], "f4"), np.array([3, 4, 5], "f4")
POSITIONS = np.array([[0, 0], [1, 1], [5, 5]], "i4")
PLACES = np.arange(6)
ANGLES = POSITIONS[..., None] / 100 ** (PLACES / 6)
LIMITED = 0.6 * np.tanh(X)

CASES: list[tuple[str, list[Array], dict[str, Any], Array]] = [
    (
        "BatchBoxCox",
        [X, POWERS, SHIFTS],
        {},
        np.stack(
            [np.log(X[:, 0] + 3), 2 * (np.sqrt(X[:, 1] + 4) - 1), ((X[:, 2] + 5) ** 2 - 1) / 2], 1
        ),
    ),
    ("BatchBoxCox", [-9 + 0 * X[:, :1], POWERS[:1], SHIFTS[:1]], {}, np.full((4, 1), np.log(1e-6))),
    (
        "StumpFunc",
        [X],
        {"threshold": 0.2, "low_value": -1.0, "high_value": 2.0},
        np.where(X <= 0.2, -1, 2),
    ),
    (
        "SinusoidPositionEncoding",
        [POSITIONS],
        {"embedding_size": 6, "alpha": 100.0, "amplitude": 2.0},
        2 * np.where(PLACES % 2 == 0, np.sin(ANGLES), np.cos(ANGLES)),
    ),
    ("ClipTensorByScaling", [X, np.array(4.0, "f4")], {"threshold": 2.0}, X / 2),
    ("ClipTensorByScaling", [X, np.array(1.0, "f4")], {"threshold": 2.0}, X),
    (
        "ClipTensorByScaling",
        [X, np.array(4.0, "f4"), np.array(0.5, "f4")],
        {"threshold": 2.0},
        X / 4,
    ),
]


@pytest.mark.parametrize(("kind", "inputs", "arguments", "wanted"), CASES)
def test_values(kind: str, inputs: list[Array], arguments: dict[str, Any], wanted: Array) -> None:
    np.testing.assert_allclose(run(kind, inputs, **arguments)[0], wanted, rtol=1e-4, atol=1e-5)


def test_places_on_both_sides_of_a_threshold() -> None:
    low, high = run("StumpFuncIndex", [X], 2, threshold=0.2)
    np.testing.assert_array_equal(low, np.nonzero(X.reshape(-1) <= 0.2)[0])
    np.testing.assert_array_equal(high, np.nonzero(X.reshape(-1) > 0.2)[0])


PIECES = {"bounds": [0.0, 0.5, 1.0], "slopes": [2.0, 0.5], "intercepts": [0.0, 0.75]}


@pytest.mark.parametrize("as_inputs", [False, True])
def test_pieces_of_lines(as_inputs: bool) -> None:
    p = np.array([-1, 0.25, 0.5, 0.75, 2], "f4")
    wanted = np.array([0, 0.5, 1, 1.125, 1.25])
    arrays = [np.array(values, "f4") for values in PIECES.values()] if as_inputs else []
    arguments = {} if as_inputs else PIECES
    assert_run("PiecewiseLinearTransform", [p, *arrays], wanted, rtol=1e-5, binary=1, **arguments)
    both = np.stack([1 - p, p], 1)
    (two,) = run("PiecewiseLinearTransform", [both, *arrays], binary=1, **arguments)
    np.testing.assert_allclose(two, np.stack([1 - wanted, wanted], 1), rtol=1e-5, atol=1e-6)
    repeated = [np.tile(values, 2) for values in arrays]
    classes = arguments and {name: values * 2 for name, values in PIECES.items()}
    (several,) = run("PiecewiseLinearTransform", [np.stack([p, p[::-1]], 1), *repeated], **classes)
    np.testing.assert_allclose(several, np.stack([wanted, wanted[::-1]], 1), rtol=1e-5)
    with pytest.raises(RuntimeError, match="do not fit 3 classes"):
        run("PiecewiseLinearTransform", [X], **PIECES)


def test_codes_of_a_codebook() -> None:
    book, codes = numbers(6), [np.array([[0, 5], [2, 2]], "i4"), np.array([3, 2], "u1")]
    for value, code in zip(run("QuantDecode", [book, *codes], 2), codes, strict=True):
        np.testing.assert_array_equal(value, book[code])
    given = [numbers(2, 2), numbers(2)]
    (gradient,) = run("QuantDecodeGradient", [book, *codes, *given])
    wanted = np.zeros(6)
    for code, dy in zip(codes, given, strict=True):
        np.add.at(wanted, code, dy)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5)
    assert_gradients("QuantDecode", [book, *codes], [0], 2, (0, 1))


def test_parameters_stay_within_limits() -> None:
    (all_,) = run("EnsureClipped", [X], in_place={0: 0}, min=-0.3, max=0.4)
    np.testing.assert_array_equal(all_, np.clip(X, np.float32(-0.3), np.float32(0.4)))
    rows = np.array([2, 0])
    (some,) = run("EnsureClipped", [X, rows, X[rows]], in_place={0: 0}, min=-0.3)
    np.testing.assert_array_equal(some[rows], np.maximum(X[rows], np.float32(-0.3)))
    np.testing.assert_array_equal(some[[1, 3]], X[[1, 3]])


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (1, 1)])
def test_rows_of_one_norm(most: int, kept: int) -> None:
    w, rows = np.array([[3, 4], [0.3, 0.4], [1, 0]], "f4"), np.array([1, 0, 1])
    (y,) = run("SparseNormalize", [w, rows], in_place={0: 0}, use_max_norm=most, norm=2.0)
    np.testing.assert_allclose(y[0], [1.2, 1.6], rtol=1e-5)
    np.testing.assert_allclose(y[1], w[1] if kept else [1.2, 1.6], rtol=1e-5)
    np.testing.assert_array_equal(y[2], w[2])
    half = run("Float16SparseNormalize", [w.astype("f2"), rows], in_place={0: 0}, norm=2.0)[0]
    assert half.dtype == np.float16
    np.testing.assert_allclose(half[0], [1.2, 1.6], rtol=1e-2)
    (same,) = run("SparseNormalize", [w, rows[:0]], in_place={0: 0}, use_max_norm=most, norm=2.0)
    np.testing.assert_array_equal(same, w)


def test_pieces_may_be_given_by_class() -> None:
    x, bounds = np.array([[0.5, 3], [9, 1]], "f4"), np.array([[0, 1], [1, 2]], "f4")
    slopes, intercepts = np.array([[2], [3]], "f4"), np.array([[0], [1]], "f4")
    (y,) = run("PiecewiseLinearTransform", [x, bounds, slopes, intercepts])
    np.testing.assert_allclose(y, [[1, 7], [2, 4]])
