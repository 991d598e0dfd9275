"""Sparse updates are the dense ones of single rows, one after the other, also of repeated rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from poseidon.caffe2.operators.training.sparse_optimizers import gradient_rows, rounds
from tests.support.caffe2_operators import Array, numbers, run


def test_the_rows_of_a_round_are_distinct() -> None:
    found = [
        (rows.tolist(), positions.tolist())
        for rows, positions in rounds(torch.tensor([5, 2, 5, 5, 2]))
    ]
    assert found == [([2, 5], [1, 0]), ([2, 5], [4, 2]), ([5], [3])]
    assert list(rounds(torch.tensor([], dtype=torch.int32))) == []


def test_distinct_rows_are_one_round_in_their_order() -> None:
    ((rows, positions),) = rounds(torch.tensor([[3], [0]]))
    assert rows.tolist() == [3, 0]
    assert positions.tolist() == [0, 1]


def test_indices_of_two_dimensions_are_flattened() -> None:
    assert gradient_rows(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(9, 4)).shape == (6, 4)


@pytest.mark.parametrize(
    ("gradient", "indices", "reason"),
    [
        ((3, 4), (2,), r"\(3, 4\), expected \(2, 4\): a row for each index"),
        ((2, 5), (2,), r"\(2, 5\), expected \(2, 4\)"),
    ],
)
def test_a_gradient_without_a_row_for_each_index_is_refused(
    gradient: tuple[int, ...], indices: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        gradient_rows(torch.zeros(gradient), torch.zeros(indices), torch.zeros(9, 4))


W, M = numbers(5, 2), numbers(5, 2, seed=2)
H, D = np.abs(numbers(5, 2, seed=3)), np.abs(numbers(5, 2, seed=4))
LR, ITERATION = np.array([0.1], "float32"), np.array([3])

CASES: list[tuple[str, str, list[Array], list[Array], dict[str, Any]]] = [
    ("SparseAdagrad", "Adagrad", [W, H], [LR], {}),
    ("SparseAdam", "Adam", [W, M, H], [LR, ITERATION], {"beta2": 0.9}),
    ("SparseAdadelta", "Adadelta", [W, H, D], [LR], {}),
    ("SparseFtrl", "Ftrl", [W, np.stack((H, M), -1)], [], {"alpha": 0.1}),
    ("SparseFtrl", "Ftrl", [W, np.stack((H, M), -1)], [LR], {}),
]


@pytest.mark.parametrize("indices", [[3, 0], [1, 4, 1, 1], []])
@pytest.mark.parametrize(("sparse", "dense", "state", "rest", "arguments"), CASES)
def test_rows(
    sparse: str,
    dense: str,
    state: list[Array],
    rest: list[Array],
    arguments: dict[str, Any],
    indices: list[int],
) -> None:
    g, count = numbers(len(indices), 2, seed=7), len(state)
    shared = {index: index for index in range(count)}
    wanted = [value.copy() for value in state]
    for row, part in zip(indices, g, strict=True):
        updated = run(
            dense, [*(value[row] for value in wanted), part, *rest], count, shared, **arguments
        )
        for value, new in zip(wanted, updated, strict=True):
            value[row] = new
    found = run(sparse, [*state, np.array(indices, "int64"), g, *rest], count, shared, **arguments)
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_one_number_for_each_row() -> None:
    g, h = numbers(2, 2, seed=7), H[:, 0].copy()
    w, history = run(
        "RowWiseSparseAdagrad", [W, h, np.array([3, 3]), g, LR], 2, {0: 0, 1: 1}, epsilon=1e-3
    )
    expected = W[3].copy()
    total = h[3]
    for part in g:
        total = total + (part * part).mean()
        expected += 0.1 * part / (np.sqrt(total) + 1e-3)
    np.testing.assert_allclose(w[3], expected, rtol=1e-5)
    np.testing.assert_allclose(history[3], total, rtol=1e-5)
    second = run(
        "RowWiseSparseAdam", [W, M, h, np.array([3]), g[:1], LR, ITERATION], 3, {0: 0, 1: 1, 2: 2}
    )[2]
    np.testing.assert_allclose(second[3], 0.999 * h[3] + 0.001 * (g[0] ** 2).mean(), rtol=1e-5)


def test_sparse_wngrad() -> None:
    rows, b, lr = np.array([2, 0]), np.array([2], "float32"), np.array([0.1], "float32")
    w, g = numbers(3, 2), numbers(2, 2, seed=1)
    wanted = w.copy()
    wanted[rows] += 0.1 / 2.5 * g
    found = run("SparseWngrad", [w, b, rows, g, lr], 2, {0: 0, 1: 1}, epsilon=0.5)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 + (g * g).sum() / 2, rtol=1e-5)
    found = run("SparseWngrad", [w, b, rows[:0], g[:0], lr], 2, {0: 0, 1: 1}, epsilon=0.5)
    np.testing.assert_array_equal(found[1], b)


def test_sparse_storm() -> None:
    rows, total, lr = np.array([2, 0]), np.array([0.5], "float32"), np.array([0.4], "float32")
    w, m, g = numbers(3, 2), numbers(3, 2, seed=2), numbers(2, 2, seed=1)
    summed = 0.5 + (g * g).sum()
    rate = 0.4 / (0.3 + summed) ** (1 / 3)
    moved, wanted = m.copy(), w.copy()
    moved[rows] = g + (1 - 50 * rate**2) * (m[rows] - g)
    wanted[rows] += rate * moved[rows]
    found = run(
        "SparseStorm", [w, m, total, g, rows, lr], 3, {0: 0, 1: 1, 2: 2}, momentum=50.0, beta=0.3
    )
    for value, expected in zip(found, [wanted, moved, [summed]], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [2, 50])
def test_rectified_adam(number: int) -> None:
    g, t, betas = numbers(1, 2, seed=7), number + 1, (0.8, 0.9)
    first, second = 0.8 * M[:1] + 0.2 * g, 0.9 * H[:1] + 0.1 * g * g
    plain = first / (1 - 0.8**t)
    limit = 2 / 0.1 - 1
    length = limit - 2 * t * 0.9**t / (1 - 0.9**t)
    assert (length >= 5) == (number == 50)
    if length >= 5:
        r = np.sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length))
        plain *= r * np.sqrt(1 - 0.9**t) / (np.sqrt(second) + 0.1)
    settings = {"beta1": betas[0], "beta2": betas[1], "epsilon": 0.1, "enableRAdam": True}
    inputs = [W, M, H, np.array([0]), g, LR, np.array([number])]
    w, _, _, step = run("SparseAdam", inputs, 4, {0: 0, 1: 1, 2: 2}, **settings)
    np.testing.assert_allclose(step, plain, rtol=1e-4)
    np.testing.assert_allclose(w[:1], W[:1] + 0.1 * plain, rtol=1e-4)
    np.testing.assert_array_equal(w[1:], W[1:])


def test_moments_decay_for_the_iterations_without_a_gradient() -> None:
    g, seen = numbers(2, 2, seed=7), np.array([0, 0, 2, 0, 3])
    settings = {"beta1": 0.8, "beta2": 0.9, "epsilon": 0.1}
    rows, passed = np.array([4, 2]), np.array([[1.0], [2.0]])
    first, second = 0.8**passed * M[rows] + 0.2 * g, 0.9**passed * H[rows] + 0.1 * g * g
    late = np.array([[0.0], [0.8]]) * M[rows]
    inputs = [W, M, H, seen, rows, g, LR, np.array([3])]
    found = run("SmartDecaySparseAdam", inputs, 4, {i: i for i in range(4)}, **settings)
    wanted = [W.copy(), M.copy(), H.copy(), np.array([0, 0, 4, 0, 4])]
    wanted[0][rows] += 0.1 * (first + late) / (np.sqrt(second) + 0.1)
    wanted[1][rows], wanted[2][rows] = first, second
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_a_count_of_updates_decays() -> None:
    last, counts = np.array([[3], [9], [8]]), np.array([4.0, 5.0, 6.0])
    inputs = [last, counts, np.array([0, 2, 2]), np.array([10])]
    found, kept = run("RowWiseCounter", inputs, 2, {0: 0, 1: 1}, counter_halflife=2)
    np.testing.assert_array_equal(found, [[10], [9], [10]])
    # row 2 comes twice
    np.testing.assert_allclose(kept, [1 + 4 * 2**-3.5, 5, 1 + 6 / 2 + 1], rtol=1e-6)
    found, kept = run("RowWiseCounter", inputs, 2, {0: 0, 1: 1})
    np.testing.assert_array_equal(kept, counts)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_some_rows_are_regularized(p: float) -> None:
    table, rows = np.array([[0.3, -0.05], [1, 2], [-1, 0]], "f4"), np.array([0, 2, 2])
    (found,) = run("SparseLpRegularizer", [table, rows], 1, {0: 0}, p=p, reg_lambda=0.1)
    # row 2 comes twice
    wanted = [[0.2, 0], [1, 2], [-0.8, 0]] if p == 1 else [[0.27, -0.045], [1, 2], [-0.81, 0]]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    (found,) = run("SparseLpRegularizer", [table, rows[1:2]], 1, {0: 0}, p=p)
    np.testing.assert_allclose(found[2, 0] + 1, 1e-5, rtol=0.02)
    with pytest.raises(RuntimeError, match="p must be 1 or 2"):
        run("SparseLpRegularizer", [table, rows], 1, {0: 0}, p=3.0)
