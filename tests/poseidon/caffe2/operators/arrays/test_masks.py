"""Masked sequences against a loop over all places, gradients by finite differences."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.caffe2_operators import assert_gradients, numbers, run

X = numbers(3, 4)
LENGTHS = np.array([2, 0, 4], "i4")
SIDES: dict[str, Callable[[int, int], Any]] = {
    "upper": operator.gt,
    "lower": operator.lt,
    "upperdiag": operator.ge,
    "lowerdiag": operator.le,
}


@pytest.mark.parametrize("mode", [*SIDES, "sequence", "window"])
def test_masked_places(mode: str) -> None:
    wanted = X.copy()
    for i, j in np.ndindex(3, 4):
        if mode == "sequence":
            masked = j >= LENGTHS[i]
        elif mode == "window":
            masked = abs(j - LENGTHS[i]) > 1
        else:
            masked = SIDES[mode](j, i)
        if masked:
            wanted[i, j] = -7
    inputs = [X, LENGTHS] if mode in ("sequence", "window") else [X]
    arguments = {"mode": mode, "radius": 1, "fill_val": -7.0}
    np.testing.assert_array_equal(run("SequenceMask", inputs, **arguments)[0], wanted)
    np.testing.assert_array_equal(
        run("SequenceMask", inputs, grad=1, **arguments)[0], np.where(wanted == -7, 0, X)
    )
    assert_gradients("SequenceMask", inputs, [0], **{**arguments, "fill_val": 0.0})


def test_batches_and_dimensions_that_are_masked_as_a_whole() -> None:
    x = numbers(2, 3, 4, 5)
    wanted = x.copy()
    for i, j in np.ndindex(3, 4):
        if j > i:
            wanted[:, i, j] = -7
    (y,) = run(
        "SequenceMask", [x], mode="upper", axis=2, batch=0, repeat_from_axis=3, fill_val=-7.0
    )
    np.testing.assert_array_equal(y, wanted)


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no mode 'middle'"):
        run("SequenceMask", [X], mode="middle")
    with pytest.raises(RuntimeError, match="no mode 'sequence'"):
        run("SequenceMask", [X], mode="sequence")
