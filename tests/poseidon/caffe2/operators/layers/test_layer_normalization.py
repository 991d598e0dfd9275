"""Normalization of single examples against numpy, gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, assert_run, numbers, run

SCALE, BIAS = numbers(4), numbers(4, seed=1)


def test_the_other_name_of_layer_norm() -> None:
    x = numbers(3, 4)
    found, wanted = (run(kind, [x], 3) for kind in ("C10LayerNorm_DontUseThisOpYet", "LayerNorm"))
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("affine", [False, True])
def test_layers_of_nothing(affine: bool) -> None:
    inputs = [numbers(2, 4)[:0], *([numbers(4), numbers(4)] if affine else [])]
    found = run("LayerNorm", inputs, 3, elementwise_affine=int(affine))
    assert [value.shape for value in found] == [(0, 4), (0, 1), (0, 1)]
    assert_gradients("LayerNorm", inputs, range(len(inputs)), 3, elementwise_affine=int(affine))


def test_a_layer_of_all_dimensions_has_gradients_by_element() -> None:
    inputs = [numbers(2, 3), numbers(2, 3) + 1, numbers(2, 3)]
    assert_gradients("LayerNorm", inputs, range(3), 3, axis=0, epsilon=1e-3, elementwise_affine=1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vectors(axis: int) -> None:
    x = numbers(3, 4)
    assert_run(
        "Normalize", [x], x / np.linalg.norm(x, axis=axis, keepdims=True), rtol=1e-5, axis=axis
    )
    assert_gradients("Normalize", [x], [0], axis=axis)
    x[0] = 0
    wanted = x / np.maximum(np.abs(x).sum(axis, keepdims=True), 1e-30)
    np.testing.assert_allclose(run("NormalizeL1", [x], axis=axis)[0], wanted, rtol=1e-5)


def test_rms_norm() -> None:
    x, s, b = numbers(4, 6), numbers(6, seed=1), numbers(6, seed=2)
    inverse = 1 / np.sqrt((x**2).mean(1) + 0.1)
    y, found = run("RMSNorm", [x, s, b], 2, eps=0.1)
    np.testing.assert_allclose(found, inverse, rtol=1e-5)
    np.testing.assert_allclose(y, x * inverse[:, None] * s + b, rtol=1e-4, atol=1e-6)
    assert_gradients("RMSNorm", [x, s, b], [0, 1, 2], 2, eps=0.1)
