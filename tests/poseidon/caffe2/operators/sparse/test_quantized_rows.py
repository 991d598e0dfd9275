"""Rows of 8-bit numbers: values within half a step of what they stand for, sums of rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, numbers, run

X = numbers(6, 10)
STEPS = np.ptp(X, axis=1, keepdims=True) / 255
INDICES, LENGTHS = np.array([5, 0, 2, 2, 1]), np.array([2, 0, 3], "i4")
WEIGHTS = np.abs(numbers(5, seed=3))


@pytest.mark.parametrize("suffix", ["", "HalfScaleBias"])
@pytest.mark.parametrize("source", ["Float", "HalfFloat"])
@pytest.mark.parametrize("target", ["Float", "HalfFloat"])
def test_fused_rows_are_restored(suffix: str, source: str, target: str) -> None:
    x = X if source == "Float" else X.astype("f2")
    (fused,) = run(f"{source}ToFused8BitRowwiseQuantized{suffix}", [x])
    assert fused.dtype == np.uint8
    assert fused.shape == (6, 14 if suffix else 18)
    (back,) = run(f"Fused8BitRowwiseQuantized{suffix}To{target}", [fused])
    # with a suffix as in Caffe2
    assert back.dtype == ("f4" if target == "Float" or suffix else "f2")
    coarse = 0 if not suffix and target == source == "Float" else 0.01
    assert (np.abs(back - X) <= STEPS * 0.51 + coarse).all()


def test_the_numbers_of_a_fused_row() -> None:
    (fused,) = run("FloatToFused8BitRowwiseQuantized", [np.array([[0, 255, 51], [7, 7, 7]], "f4")])
    np.testing.assert_array_equal(fused[:, :3], [[0, 255, 51], [0, 0, 0]])
    np.testing.assert_array_equal(fused[:, 3:].copy().view("f4"), [[1, 0], [0, 7]])


def test_a_single_fused_row_is_restored() -> None:
    (fused,) = run("FloatToFused8BitRowwiseQuantized", [np.array([[7.0]], "f4")])
    assert run("Fused8BitRowwiseQuantizedToFloat", [fused])[0].tolist() == [[7.0]]


def test_rows_with_pairs_are_restored() -> None:
    rows, pairs = run("FloatToRowwiseQuantized8Bits", [X], 2)
    assert rows.dtype == np.uint8
    (back,) = run("Rowwise8BitQuantizedToFloat", [rows, pairs])
    assert (np.abs(back - X) <= STEPS * 0.51).all()


def by_lengths(rows: Array, mean: bool) -> Array:
    parts = np.split(rows, np.cumsum(LENGTHS)[:-1])
    return np.stack([part.sum(0) / (max(len(part), 1) if mean else 1) for part in parts])


@pytest.mark.parametrize("mean", [False, True])
def test_sums_and_means_of_rows(mean: bool) -> None:
    kind = "Mean" if mean else "Sum"
    (fused,) = run("FloatToFused8BitRowwiseQuantized", [X])
    rows, pairs = run("FloatToRowwiseQuantized8Bits", [X], 2)
    (exact,) = run("Fused8BitRowwiseQuantizedToFloat", [fused])
    np.testing.assert_allclose(
        run("GatherFused8BitRowwise", [fused, INDICES])[0], exact[INDICES], rtol=1e-6
    )
    wanted = by_lengths(exact[INDICES], mean)
    weighted = by_lengths(exact[INDICES] * WEIGHTS[:, None], mean)
    cases = [
        (f"SparseLengths{kind}Fused8BitRowwise", [fused, INDICES, LENGTHS], wanted),
        (
            f"SparseLengthsWeighted{kind}Fused8BitRowwise",
            [fused, WEIGHTS, INDICES, LENGTHS],
            weighted,
        ),
        (f"SparseLengths{kind}8BitsRowwise", [rows, INDICES, LENGTHS, pairs], wanted),
        (
            f"SparseLengthsWeighted{kind}8BitsRowwise",
            [rows, WEIGHTS, INDICES, LENGTHS, pairs],
            weighted,
        ),
    ]
    for name, inputs, expected in cases:
        np.testing.assert_allclose(
            run(name, inputs)[0], expected, rtol=1e-4, atol=1e-5, err_msg=name
        )
