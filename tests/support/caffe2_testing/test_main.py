"""Tests in the words of Caffe2's own tests pass, and fail where they should."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from tests.support.caffe2_testing.__main__ import bind

TEST = """
import caffe2.python.hip_test_util as hiputl
import caffe2.python.hypothesis_test_util as hu
import caffe2.python.ideep_test_util as mu
import caffe2.python.mkl_test_util
import caffe2.python.serialized_test.serialized_test_util as serial
import numpy as np
from caffe2.python import core, gradient_checker, optimizer_test_util, test_util, workspace
from caffe2.python.rnn.rnn_cell_test_util import sigmoid
from hypothesis import given, settings

class TestSigmoid(serial.SerializedTestCase):
    @given(X=hu.tensor(max_dim=2, max_value=3), **hu.gcs)
    @settings(max_examples=2, deadline=None)
    def test_sigmoid(self, X, gc, dc):
        op = core.CreateOperator("Sigmoid", ["X"], ["Y"])
        self.assertReferenceChecks(gc, op, [X], lambda X: [sigmoid(X)])
        self.assertGradientChecks(gc, op, [X], 0, [0])
        assert not hiputl.run_in_hip(gc, dc)

    def test_a_wrong_gradient(self):
        op = core.CreateOperator("Sqr", ["x"], ["y"])
        self.assertReferenceChecks(
            hu.cpu_do, op, [np.array([1, -2], "f4")], lambda x: [x * x], output_to_grad="y",
            grad_reference=lambda g, o, i: [i[0] * g],
        )
"""


@pytest.mark.usefixtures("unbound")
def test_a_test_of_caffe2_passes_or_fails() -> None:
    bind()
    names: dict[str, Any] = {"__name__": "sigmoid_test"}
    exec(TEST, names)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(names["TestSigmoid"]).run(result)
    assert (result.testsRun, result.errors) == (2, [])
    ((_, text),) = result.failures
    assert "x_grad" in text
