"""Checks against references: what they accept and what they refuse; strategies of segments."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest

from poseidon.caffe2 import core, dyndep
from tests.support.caffe2_testing import hypothesis_test_util as hu
from tests.support.caffe2_testing import ideep_test_util, mkl_test_util


@pytest.fixture
def case() -> Any:
    made = hu.HypothesisTestCase()
    made.setUp()
    return made


def test_a_dense_gradient_is_compared(case: Any) -> None:
    op = core.CreateOperator("Sqr", ["x"], ["y"])
    x = np.array([1.0, -2.0], dtype=np.float32)
    arguments = {"output_to_grad": "y", "reference": lambda x: [x * x]}
    case.assertReferenceChecks(
        hu.cpu_do, op, [x], grad_reference=lambda g, o, i: [2 * x * g], **arguments
    )
    with pytest.raises(AssertionError, match="x_grad"):
        case.assertReferenceChecks(
            hu.cpu_do, op, [x], grad_reference=lambda g, o, i: [x * g], **arguments
        )


def test_a_sparse_gradient_is_values_and_indices(case: Any) -> None:
    op = core.CreateOperator("Gather", ["table", "rows"], ["y"])
    table, rows = np.eye(3, dtype=np.float32), np.array([2, 0, 2], dtype=np.int64)
    case.assertReferenceChecks(
        hu.cpu_do,
        op,
        [table, rows],
        lambda table, rows: [table[rows]],
        output_to_grad="y",
        grad_reference=lambda g, o, i: [(g, rows), None],
    )


def test_a_reference_may_take_an_array_of_one_element_for_a_number(case: Any) -> None:
    def reference(w: Any, h: Any, rows: Any, g: Any, lr: Any) -> list[Any]:
        w, h = np.copy(w), np.copy(h)
        for index, row in enumerate(rows):
            h[row] += np.mean(np.square(g[index]))
            w[row] = w[row] + lr * g[index] / (np.sqrt(h[row]) + 0.5)
        return [w, h]

    op = core.CreateOperator("RowWiseSparseAdagrad", list("whigr"), ["w", "h"], epsilon=0.5)
    w, h, rows = np.array([1, 2, 3], "f4"), np.array([1, 0, 4], "f4"), np.array([2, 0])
    inputs = [w, h, rows, np.array([0.5, -3], "f4"), np.array([-0.1], "f4")]
    case.assertReferenceChecks(hu.cpu_do, op, inputs, reference)

    def alternating(iteration: Any) -> list[Any]:
        return [np.array(0.25 if float(iteration) % 5 < 2 else 0.0)]

    op = core.CreateOperator(
        "LearningRate", "i", "r", policy="alter", base_lr=0.25, active_period=2, inactive_period=3
    )
    for iteration in range(11):
        case.assertReferenceChecks(hu.cpu_do, op, [np.array([iteration])], alternating)


def test_a_reference_may_index_by_a_list_of_slices(case: Any) -> None:
    op = core.CreateOperator("Slice", ["x"], ["y"], starts=[0, 1], ends=[-1, -2])
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    case.assertReferenceChecks(hu.cpu_do, op, [x], lambda x: [x[[slice(None), slice(1, 3)]]])


def test_shapes_must_be_inferred_where_that_is_asked(case: Any) -> None:
    x = np.zeros((2, 3), dtype=np.float32)
    relu = core.CreateOperator("Relu", ["x"], ["y"])
    case.assertReferenceChecks(
        hu.cpu_do, relu, [x], lambda x: [x], ensure_outputs_are_inferred=True
    )
    unique = core.CreateOperator("NonZero", ["x"], ["y"])
    if core.IsOperator("NonZero"):
        with pytest.raises(AssertionError, match="not inferred"):
            case.assertReferenceChecks(
                hu.cpu_do,
                unique,
                [x],
                lambda x: [np.zeros((0, 2))],
                ensure_outputs_are_inferred=True,
            )


@hypothesis.given(x=hu.arrays([3], elements=hu.floats(0.1, 0.7)), least=hu.floats(min_value=0.1))
def test_floats_are_of_32_bits_within_limits_that_32_bits_cannot_hold(x: Any, least: float) -> None:
    assert x.dtype == np.float32
    assert ((x >= 0.1) & (x.astype(np.float64) <= 0.7)).all()
    assert not least < 0.1
    assert np.isnan(least) or least == np.float32(least)


@hypothesis.given(pair=hu.segmented_tensor(allow_empty=True, segment_generator=hu.lengths))
def test_lengths_add_up_to_the_rows(pair: Any) -> None:
    data, lengths = pair
    assert lengths.dtype == np.int32
    assert lengths.sum() == len(data)


@hypothesis.given(triple=hu.sparse_lengths_tensor(min_dim=2))
def test_lengths_add_up_to_the_indices(triple: Any) -> None:
    data, indices, lengths = triple
    assert lengths.sum() == len(indices)
    assert (indices < len(data)).all()


@hypothesis.given(several=hu.ntensors(2, 4))
def test_several_tensors_have_one_shape(several: Any) -> None:
    assert 2 <= len(several) <= 4
    assert len({each.shape for each in several}) == 1


def test_an_operator_that_fails_is_expected(case: Any) -> None:
    op = core.CreateOperator("Assert", ["x"], [], error_msg="the sky falls")
    case.assertRunOpRaises(hu.cpu_do, op, [np.array([False])], regexp="the sky falls")
    with pytest.raises(AssertionError):
        case.assertRunOpRaises(hu.cpu_do, op, [np.array([True])])


def test_libraries_of_operators_are_noted() -> None:
    dyndep.InitOpsLibrary("@/caffe2/caffe2/contrib/gloo:gloo_ops")
    assert "@/caffe2/caffe2/contrib/gloo:gloo_ops" in dyndep.GetImportedOpsLibraries()
    assert mkl_test_util.gcs is hu.gcs


def test_devices_of_other_libraries_have_caffe2s_numbers() -> None:
    assert (mkl_test_util.mkl_do.device_type, ideep_test_util.ideep_do.device_type) == (2, 5)
    assert mkl_test_util.mkl_do != mkl_test_util.cpu_do
