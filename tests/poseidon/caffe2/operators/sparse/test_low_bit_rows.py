"""Rows of 2-bit and 4-bit numbers, and sums over rows of which some are pruned."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, numbers, run

X = numbers(5, 8)
INDICES, LENGTHS = np.array([4, 0, 2, 2, 1]), np.array([2, 0, 3], "i4")
WEIGHTS = np.array([1, 2, 0.5, -1, 3], "f4")


def by_segment(rows: Array) -> Array:
    return np.stack([part.sum(0) for part in np.split(rows, [2, 2])])


@pytest.mark.parametrize("bits", [2, 4])
def test_values_are_kept_to_half_a_step(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X])
    assert (fused.dtype, fused.shape) == (np.uint8, (5, bits + 4))
    (restored,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    step = np.ptp(X, axis=1, keepdims=True) / (2**bits - 1)
    assert (np.abs(restored - X) <= 0.51 * step + 0.01).all()
    (fake,) = run(f"FloatToFused{bits}BitFakeRowwiseQuantized", [X])
    np.testing.assert_array_equal(run("Fused8BitRowwiseQuantizedToFloat", [fake])[0], restored)


def test_the_first_number_is_in_the_lowest_bits() -> None:
    (fused,) = run("FloatToFused4BitRowwiseQuantized", [np.array([[0, 15, 1, 2]], "f4")])
    assert fused[0, :2].tolist() == [0xF0, 0x21]
    np.testing.assert_array_equal(fused[0, 2:].view("f2"), [1, 0])
    (equal,) = run("FloatToFused2BitRowwiseQuantized", [np.full((1, 4), 3, "f4")])
    np.testing.assert_array_equal(
        run("Fused2BitRowwiseQuantizedToHalf", [equal])[0], np.full((1, 4), 3)
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_sums_and_means(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X])
    (rows,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    wanted = by_segment(rows[INDICES])
    end = f"Fused{bits}BitRowwise"
    np.testing.assert_allclose(
        run(f"SparseLengthsSum{end}", [fused, INDICES, LENGTHS])[0], wanted, rtol=1e-5
    )
    (mean,) = run(f"SparseLengthsMean{end}", [fused, INDICES, LENGTHS])
    np.testing.assert_allclose(mean, wanted / [[2], [1], [3]], rtol=1e-5)
    (weighted,) = run(f"SparseLengthsWeightedSum{end}", [fused, WEIGHTS, INDICES, LENGTHS])
    np.testing.assert_allclose(
        weighted, by_segment(rows[INDICES] * WEIGHTS[:, None]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pruned_rows_do_not_count(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X])
    (rows,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    table = np.array([0, -1, 1, -1, 2], "i4")
    rows[[1, 3]] = 0
    (found,) = run(
        f"SparseLengthsSum{bits}BitRowwiseSparse", [fused[[0, 2, 4]], INDICES, LENGTHS, table]
    )
    np.testing.assert_allclose(found, by_segment(rows[INDICES]), rtol=1e-5)
    kind = f"SparseLengthsWeightedSum{bits}BitRowwiseSparse"
    (found,) = run(kind, [fused[[0, 2, 4]], WEIGHTS, INDICES, LENGTHS, table])
    np.testing.assert_allclose(
        found, by_segment(rows[INDICES] * WEIGHTS[:, None]), rtol=1e-4, atol=1e-5
    )


def test_indices_are_looked_up() -> None:
    table = np.array([0, -1, 1, -1, 2], "i4")
    indices, lengths, weights = run(
        "SparseLengthsSumSparseLookup", [INDICES, LENGTHS, table, WEIGHTS], 3
    )
    assert (indices.tolist(), lengths.tolist()) == ([2, 0, 1, 1], [2, 0, 2])
    assert weights.tolist() == [1, 2, 0.5, -1]
    indices, lengths = run("SparseLengthsSumSparseLookup", [INDICES, LENGTHS, np.zeros(1, "i4")], 2)
    assert (indices.tolist(), lengths.tolist()) == (INDICES.tolist(), LENGTHS.tolist())
