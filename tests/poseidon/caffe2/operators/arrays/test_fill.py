"""Fillers: shapes from arguments and inputs, and values that inputs limit."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe2 import core
from tests.support.caffe2_operators import assert_run, run


def test_a_shape_must_be_a_list() -> None:
    with pytest.raises(RuntimeError, match="must be a list"):
        run("GaussianFill", [], shape=32)


@pytest.mark.parametrize("kind", ["UniformIntFill", "UniformFill"])
def test_no_values_lie_between_limits_in_the_wrong_order(kind: str) -> None:
    dtype = "i4" if "Int" in kind else "f4"
    low, high = np.array(3, dtype), np.array(7, dtype)
    shape = np.array([4, 2])
    (values,) = run(kind, [shape, low, high], input_as_shape=1)
    assert values.shape == (4, 2)
    assert (values >= 3).all()
    assert (values <= 7).all()
    assert run(kind, [shape, high, low], input_as_shape=1)[0].shape == (0, 2)


def test_a_second_input_has_the_value_of_a_constant() -> None:
    shape, value = np.zeros((2, 3), "i8"), np.array([7], "i8")
    assert_run("ConstantFill", [shape, value], np.full((2, 3), 7), dtype=core.DataType.INT64)
