"""Softmax with losses and cross entropies against numpy, gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import Array, assert_gradients, assert_run, numbers, run

X, LABELS, WEIGHTS = numbers(4, 3), np.array([0, 2, 1, 2], "i4"), np.array([0.5, 2, 0, 1], "f4")


def softmax(x: Array, axis: int = -1) -> Array:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


P = softmax(X)
LOSSES = -np.log(P[np.arange(4), LABELS])
Q = softmax(numbers(4, 3, seed=2))
CASES: list[tuple[list[Array], dict[str, Any], Any]] = [
    ([X, LABELS], {}, LOSSES.mean()),
    ([X, LABELS.reshape(4, 1)], {"scale": 0.5}, LOSSES.mean() / 2),
    ([X, LABELS, WEIGHTS], {}, (LOSSES * WEIGHTS).sum() / 3.5),
    ([X, LABELS, WEIGHTS], {"average_by_batch_size": 1}, (LOSSES * WEIGHTS).sum() / 4),
    ([X, LABELS, 0 * WEIGHTS], {}, 0),
    ([X, Q], {"label_prob": 1}, -(Q * np.log(P)).sum(1).mean()),
    ([X, Q, WEIGHTS], {"label_prob": 1}, -((Q * np.log(P)).sum(1) * WEIGHTS).sum() / 3.5),
    ([X.reshape(2, 2, 3), LABELS.reshape(2, 2)], {"axis": 2}, LOSSES.mean()),
]


@pytest.mark.parametrize(("inputs", "arguments", "loss"), CASES)
def test_softmax_with_loss(inputs: list[Array], arguments: dict[str, Any], loss: float) -> None:
    found = run("SoftmaxWithLoss", inputs, 2, **arguments)
    np.testing.assert_allclose(found[0], P.reshape(inputs[0].shape), rtol=1e-5)
    np.testing.assert_allclose(found[1], loss, rtol=1e-5)
    assert_gradients("SoftmaxWithLoss", inputs, [0], 2, [1], **arguments)


def test_no_examples() -> None:
    found = run("SoftmaxWithLoss", [X[:0], LABELS[:0]], 2)
    assert found[0].shape == (0, 3)
    assert found[1] == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_pixels_without_a_label_do_not_count(weighted: bool) -> None:
    x, labels = numbers(2, 3, 2, 2), np.array([[[0, 2], [-1, 1]], [[2, -1], [0, 0]]], "int32")
    weights = np.abs(numbers(2, 2, 2))
    counted = (labels >= 0) * (weights if weighted else 1)
    p = softmax(x, 1)
    picked = np.take_along_axis(p, np.maximum(labels, 0)[:, None], 1)[:, 0]
    inputs = [x, labels, weights] if weighted else [x, labels]
    found = run("SpatialSoftmaxWithLoss", inputs, 2)
    np.testing.assert_allclose(found[0], p, rtol=1e-5)
    np.testing.assert_allclose(
        found[1], -(np.log(picked) * counted).sum() / counted.sum(), rtol=1e-5
    )
    assert_gradients("SpatialSoftmaxWithLoss", inputs, [0], 2, [1])
    np.testing.assert_array_equal(run("SpatialSoftmaxWithLoss", inputs, 2, scale=3.0)[1], found[1])
    given = [*inputs, p, np.array(1, "float32")]
    plain, scaled = (run("SpatialSoftmaxWithLossGradient", given, scale=s)[0] for s in (1.0, 3.0))
    np.testing.assert_allclose(scaled, 3 * plain, rtol=1e-5)  # the gradient alone is scaled


def test_cross_entropies_of_probabilities() -> None:
    np.testing.assert_allclose(run("LabelCrossEntropy", [P, LABELS])[0], LOSSES, rtol=1e-5)
    np.testing.assert_allclose(run("CrossEntropy", [P, Q])[0], -(Q * np.log(P)).sum(1), rtol=1e-5)
    assert_gradients("LabelCrossEntropy", [P + 0.3, LABELS], [0])
    assert_gradients("CrossEntropy", [P + 0.3, Q], [0])


def test_the_logarithm_of_zero_is_bounded() -> None:
    (y,) = run("LabelCrossEntropy", [np.array([[0, 1]], "float32"), np.array([0], "int32")])
    np.testing.assert_allclose(y, -np.log(1e-20), rtol=1e-5)
    soft = np.array([[0.25, 0.75]], "float32")
    (y,) = run("CrossEntropy", [np.array([[0, 1]], "float32"), soft])
    np.testing.assert_allclose(y, -0.25 * np.log(1e-20), rtol=1e-5)


T = (Q > 0.3).astype("float32")


@pytest.mark.parametrize(
    ("arguments", "likelihood"),
    [
        ({}, T * np.log(sigmoid(X)) + (1 - T) * np.log(sigmoid(-X))),
        ({"log_D_trick": 1}, (2 * T - 1) * np.log(sigmoid(X))),
        ({"unjoined_lr_loss": 1}, T * X + (1 - T) * np.log(sigmoid(-X))),
    ],
)
def test_cross_entropy_of_logits(arguments: dict[str, Any], likelihood: Array) -> None:
    assert_run("SigmoidCrossEntropyWithLogits", [X, T], -likelihood.mean(1), rtol=1e-4, **arguments)
    assert_gradients("SigmoidCrossEntropyWithLogits", [X, T], [0], **arguments)


def test_weighted_cross_entropy_of_logits() -> None:
    weights = np.abs(numbers(4, 3))
    likelihood = T * np.log(sigmoid(X)) + (1 - T) * np.log(sigmoid(-X))
    (y,) = run("WeightedSigmoidCrossEntropyWithLogits", [X, T, weights])
    np.testing.assert_allclose(y, -(weights * likelihood).mean(1), rtol=1e-4)
    assert_gradients("WeightedSigmoidCrossEntropyWithLogits", [X, T, weights], [0])


def test_two_classes_from_one() -> None:
    x = sigmoid(numbers(5))
    np.testing.assert_allclose(run("MakeTwoClass", [x])[0], np.stack([1 - x, x], 1), rtol=1e-6)
    assert_gradients("MakeTwoClass", [x], [0])
