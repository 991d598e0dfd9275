"""Rows of 8-bit numbers: values within half a step of what they stand for, sums of rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_run, numbers, run

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
    assert_run("GatherFused8BitRowwise", [fused, INDICES], exact[INDICES], rtol=1e-6)
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


X_OF_LOW_BIT_ROWS = numbers(5, 8)
INDICES_OF_LOW_BIT_ROWS = np.array([4, 0, 2, 2, 1])
LENGTHS_OF_LOW_BIT_ROWS = np.array([2, 0, 3], "i4")
WEIGHTS_OF_LOW_BIT_ROWS = np.array([1, 2, 0.5, -1, 3], "f4")


def by_segment(rows: Array) -> Array:
    return np.stack([part.sum(0) for part in np.split(rows, [2, 2])])


@pytest.mark.parametrize("bits", [2, 4])
def test_values_are_kept_to_half_a_step(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X_OF_LOW_BIT_ROWS])
    assert (fused.dtype, fused.shape) == (np.uint8, (5, bits + 4))
    (restored,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    step = np.ptp(X_OF_LOW_BIT_ROWS, axis=1, keepdims=True) / (2**bits - 1)
    assert (np.abs(restored - X_OF_LOW_BIT_ROWS) <= 0.51 * step + 0.01).all()
    (fake,) = run(f"FloatToFused{bits}BitFakeRowwiseQuantized", [X_OF_LOW_BIT_ROWS])
    np.testing.assert_array_equal(run("Fused8BitRowwiseQuantizedToFloat", [fake])[0], restored)


def test_the_first_number_is_in_the_lowest_bits() -> None:
    (fused,) = run("FloatToFused4BitRowwiseQuantized", [np.array([[0, 15, 1, 2]], "f4")])
    assert fused[0, :2].tolist() == [0xF0, 0x21]
    np.testing.assert_array_equal(fused[0, 2:].view("f2"), [1, 0])
    (equal,) = run("FloatToFused2BitRowwiseQuantized", [np.full((1, 4), 3, "f4")])
    assert_run("Fused2BitRowwiseQuantizedToHalf", [equal], np.full((1, 4), 3))


@pytest.mark.parametrize("bits", [2, 4])
def test_sums_and_means(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X_OF_LOW_BIT_ROWS])
    (rows,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    wanted = by_segment(rows[INDICES_OF_LOW_BIT_ROWS])
    end = f"Fused{bits}BitRowwise"
    np.testing.assert_allclose(
        run(f"SparseLengthsSum{end}", [fused, INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS])[0],
        wanted,
        rtol=1e-5,
    )
    (mean,) = run(
        f"SparseLengthsMean{end}", [fused, INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS]
    )
    np.testing.assert_allclose(mean, wanted / [[2], [1], [3]], rtol=1e-5)
    (weighted,) = run(
        f"SparseLengthsWeightedSum{end}",
        [fused, WEIGHTS_OF_LOW_BIT_ROWS, INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS],
    )
    np.testing.assert_allclose(
        weighted,
        by_segment(rows[INDICES_OF_LOW_BIT_ROWS] * WEIGHTS_OF_LOW_BIT_ROWS[:, None]),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pruned_rows_do_not_count(bits: int) -> None:
    (fused,) = run(f"FloatToFused{bits}BitRowwiseQuantized", [X_OF_LOW_BIT_ROWS])
    (rows,) = run(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    table = np.array([0, -1, 1, -1, 2], "i4")
    rows[[1, 3]] = 0
    (found,) = run(
        f"SparseLengthsSum{bits}BitRowwiseSparse",
        [fused[[0, 2, 4]], INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS, table],
    )
    np.testing.assert_allclose(found, by_segment(rows[INDICES_OF_LOW_BIT_ROWS]), rtol=1e-5)
    weighted = [WEIGHTS_OF_LOW_BIT_ROWS, INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS]
    kind = f"SparseLengthsWeightedSum{bits}BitRowwiseSparse"
    (found,) = run(kind, [fused[[0, 2, 4]], *weighted, table])
    expected = by_segment(rows[INDICES_OF_LOW_BIT_ROWS] * WEIGHTS_OF_LOW_BIT_ROWS[:, None])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_indices_are_looked_up() -> None:
    table = np.array([0, -1, 1, -1, 2], "i4")
    indices, lengths, weights = run(
        "SparseLengthsSumSparseLookup",
        [INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS, table, WEIGHTS_OF_LOW_BIT_ROWS],
        3,
    )
    assert (indices.tolist(), lengths.tolist()) == ([2, 0, 1, 1], [2, 0, 2])
    assert weights.tolist() == [1, 2, 0.5, -1]
    indices, lengths = run(
        "SparseLengthsSumSparseLookup",
        [INDICES_OF_LOW_BIT_ROWS, LENGTHS_OF_LOW_BIT_ROWS, np.zeros(1, "i4")],
        2,
    )
    assert (indices.tolist(), lengths.tolist()) == (
        INDICES_OF_LOW_BIT_ROWS.tolist(),
        LENGTHS_OF_LOW_BIT_ROWS.tolist(),
    )


def test_numbers_fit_a_scale_and_bias_of_16_bits() -> None:
    """The bias of 1000.25 is 1000, and the scale of equal values is 1; as Caffe2 computes."""
    x = np.array([[1000.25, 1001, 1000.75], [2, 2, 2]], "f4")
    for source, given in (("Float", x), ("HalfFloat", x.astype("f2"))):
        (fused,) = run(f"{source}ToFused8BitRowwiseQuantizedHalfScaleBias", [given])
        pairs = fused[:, 3:].copy().view("f2")
        np.testing.assert_array_equal(pairs, np.array([[1 / 255, 1000], [1, 2]], "f2"))
        first = [64, 255, 191] if source == "Float" else [0, 255, 255]
        assert fused[:, :3].tolist() == [first, [0, 0, 0]]
