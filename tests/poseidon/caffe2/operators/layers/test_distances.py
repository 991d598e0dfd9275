"""Distances, similarities, rankings and accuracies against numpy, gradients by finite
differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X, Y = numbers(4, 3), numbers(4, 3, seed=1)
SIGNS = np.array([1, -1, 1, -1], "float32")
COSINES = (X * Y).sum(1) / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)

CASES: list[tuple[str, list[Array], dict[str, Any], Array, list[int]]] = [
    ("DotProductWithPadding", [X, Y[:, :2]], {}, (X * Y)[:, :2].sum(1), [0, 1]),
    (
        "DotProductWithPadding",
        [X[:, :2], Y],
        {"pad_value": 2.0},
        (X * Y)[:, :2].sum(1) + 2 * Y[:, 2],
        [0, 1],
    ),
    ("DotProductWithPadding", [X, Y[:, :1]], {"replicate": 1}, (X * Y[:, :1]).sum(1), [0, 1]),
    (
        "CosineEmbeddingCriterion",
        [COSINES, SIGNS],
        {"margin": 0.1},
        np.where(SIGNS == 1, 1 - COSINES, np.maximum(0, COSINES - 0.1)),
        [0],
    ),
]


@pytest.mark.parametrize(("kind", "inputs", "arguments", "wanted", "differentiable"), CASES)
def test_pairs(
    kind: str,
    inputs: list[Array],
    arguments: dict[str, Any],
    wanted: Array,
    differentiable: list[int],
) -> None:
    np.testing.assert_allclose(run(kind, inputs, **arguments)[0], wanted, rtol=1e-4, atol=1e-5)
    assert_gradients(kind, inputs, differentiable, **arguments)


@pytest.mark.parametrize("lengths", [None, [2, 3]])
def test_pairs_of_a_session_are_ranked(lengths: list[int] | None) -> None:
    x, labels = numbers(5, 1), np.array([[0], [1], [2], [0], [1]], "float32")
    wanted, begin = [], 0
    for size in lengths or [5]:
        part = range(begin, begin + size)
        terms = [
            np.log(1 + np.exp(x[j, 0] - x[i, 0]))
            for i in part
            for j in part
            if labels[i] > labels[j]
        ]
        wanted.append(np.mean(terms))
        begin += size
    inputs = [x, labels] if lengths is None else [x, labels, np.array(lengths, "int32")]
    np.testing.assert_allclose(run("PairWiseLoss", inputs)[0], wanted, rtol=1e-5)
    assert_gradients("PairWiseLoss", inputs, [0])


def test_no_session_has_no_loss() -> None:
    x, lengths = np.zeros(0, "float32"), np.zeros(0, "int32")
    assert run("PairWiseLoss", [x, x, lengths])[0].shape == (0,)
    assert run("PairWiseLossGradient", [x, x, x, lengths])[0].shape == (0,)


@pytest.mark.parametrize(
    "kind", ["SquaredL2Distance", "L1Distance", "DotProduct", "CosineSimilarity"]
)
def test_no_pairs_at_all(kind: str) -> None:
    assert run(kind, [X[:0], Y[:0]])[0].shape == (0,)


@pytest.mark.parametrize("kind", ["SquaredL2Distance", "L1Distance", "DotProduct"])
def test_gradients_of_two_scalars_are_scalars(kind: str) -> None:
    scalar = np.array(2, "f4")
    for gradient in run(f"{kind}Gradient", [scalar, scalar, np.ones(1, "f4")], 2):
        assert gradient.shape == ()


def test_rows_of_one_element_are_padded_too() -> None:
    assert_run("DotProductWithPadding", [X[:, 0], Y[:, 0]], X[:, 0] * Y[:, 0], rtol=1e-5)
    assert_gradients("DotProductWithPadding", [X[:, 0], Y[:, 0]], [0, 1])


def _discounts(scores: Array) -> Array:
    order = np.argsort(-scores)
    found = np.empty(len(scores))
    found[order] = 1 / np.log2(np.arange(len(scores)) + 2)
    return found


@pytest.mark.parametrize("dcg", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("exponential", [False, True])
def test_lambda_rank(dcg: bool, normalised: bool, exponential: bool) -> None:
    y, r, lengths = numbers(7), np.array([2, 0, 1, 0, 0, 3, 1], "f4"), np.array([3, 4], "i4")
    arguments = {
        "use_ndcg_as_loss": dcg,
        "use_idcg_normalization": normalised,
        "use_exp_gain": exponential,
    }
    losses, gradients = run("LambdaRankNdcg", [y, r, lengths], 2, **arguments)
    for session, part in enumerate((slice(0, 3), slice(3, 7))):
        gain = r[part] if dcg and not exponential else 2 ** r[part]
        ideal, actual = gain @ _discounts(r[part]), gain @ _discounts(y[part])
        weight = np.abs(
            np.subtract.outer(gain, gain) * np.subtract.outer(*[_discounts(y[part])] * 2)
        )
        sign = np.where(np.greater.outer(r[part], r[part]), 1, -1)
        chance = 1 / (1 + np.exp(sign * np.subtract.outer(y[part], y[part])))
        scale = ideal if normalised else 1
        loss = ideal - actual if dcg else -(weight * np.log(1 - chance)).sum()
        np.testing.assert_allclose(losses[session], loss / scale, rtol=1e-4)
        np.testing.assert_allclose(
            gradients[part], -(weight * sign * chance).sum(1) / scale, rtol=1e-4, atol=1e-6
        )


def test_lambda_rank_without_relevant_rows_has_no_loss() -> None:
    losses, gradients = run(
        "LambdaRankNdcg", [numbers(3), np.zeros(3, "f4"), np.array([3, 0], "i4")], 2
    )
    np.testing.assert_array_equal(losses, [0, 0])
    np.testing.assert_array_equal(gradients, np.zeros(3))


def test_the_gradient_of_lambda_rank_is_scaled_by_session() -> None:
    y, dy, dloss = numbers(3), numbers(3, seed=1), np.array([2, 3], "f4")
    (found,) = run("LambdaRankNdcgGradient", [y, np.array([1, 2], "i4"), dy, dloss])
    np.testing.assert_allclose(found, dy * [2, 3, 3])
