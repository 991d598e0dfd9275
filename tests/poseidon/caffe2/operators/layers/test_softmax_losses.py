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


P = softmax(X)
LOSSES = -np.log(P[np.arange(4), LABELS])
Q = softmax(numbers(4, 3, seed=2))
CASES: list[tuple[list[Array], dict[str, Any], Any]] = [
    ([X, LABELS, WEIGHTS], {"average_by_batch_size": 1}, (LOSSES * WEIGHTS).sum() / 4),
    ([X, LABELS, 0 * WEIGHTS], {}, 0),
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


def test_the_gradient_alone_of_a_spatial_loss_is_scaled() -> None:
    x, labels = numbers(2, 3, 2, 2), np.array([[[0, 2], [-1, 1]], [[2, -1], [0, 0]]], "int32")
    found = run("SpatialSoftmaxWithLoss", [x, labels], 2)
    scaled = run("SpatialSoftmaxWithLoss", [x, labels], 2, scale=3.0)
    np.testing.assert_array_equal(scaled[1], found[1])
    given = [x, labels, softmax(x, 1), np.array(1, "float32")]
    plain, scaled = (run("SpatialSoftmaxWithLossGradient", given, scale=s)[0] for s in (1.0, 3.0))
    np.testing.assert_allclose(scaled, 3 * plain, rtol=1e-5)


def test_the_logarithm_of_zero_is_bounded() -> None:
    (y,) = run("LabelCrossEntropy", [np.array([[0, 1]], "float32"), np.array([0], "int32")])
    np.testing.assert_allclose(y, -np.log(1e-20), rtol=1e-5)
    soft = np.array([[0.25, 0.75]], "float32")
    (y,) = run("CrossEntropy", [np.array([[0, 1]], "float32"), soft])
    np.testing.assert_allclose(y, -0.25 * np.log(1e-20), rtol=1e-5)


T = (Q > 0.3).astype("float32")


def test_cross_entropy_of_logits_of_unjoined_examples() -> None:
    kind, wanted = "SigmoidCrossEntropyWithLogits", -(T * X - (1 - T) * np.log1p(np.exp(X))).mean(1)
    assert_run(kind, [X, T], wanted, rtol=1e-4, unjoined_lr_loss=1)
    assert_gradients(kind, [X, T], [0], unjoined_lr_loss=1)
