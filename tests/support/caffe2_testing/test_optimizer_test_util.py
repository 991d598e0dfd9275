"""The tests of optimizers pass with one that learns, and fail with one that does not."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from poseidon.caffe2 import optimizer
from tests.support.caffe2_testing import test_util
from tests.support.caffe2_testing.optimizer_test_util import (
    LRModificationTestBase,
    OptimizerTestBase,
)


class _Sgd(OptimizerTestBase, LRModificationTestBase, test_util.TestCase):
    __test__ = False  # the tests below run it
    rate = 0.1

    def build_optimizer(self, model: Any, **kwargs: Any) -> Any:
        return optimizer.build_sgd(model, base_learning_rate=self.rate, **kwargs)

    def check_optimizer(self, made: Any) -> None:
        self.assertTrue(made.get_auxiliary_parameters().shared)


class _Idle(_Sgd):
    rate = 1e-9


def test_sgd_passes() -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(_Sgd).run(result)
    assert not result.errors and not result.failures
    assert result.testsRun == 5


def test_an_optimizer_that_does_not_learn_fails() -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _Idle("testDense").debug()
