"""Runs tests that were written for Caffe2, with the modules that only such tests import.

    python -m tests.support.caffe2_testing FILE_OR_FOLDER...

Arguments go to pytest.
"""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import poseidon

NAMES = (
    "test_util",
    "hypothesis_test_util",
    "optimizer_test_util",
    "hip_test_util",
    "ideep_test_util",
    "mkl_test_util",
    "serialized_test",
    "serialized_test.serialized_test_util",
    "rnn.rnn_cell_test_util",
)
"""The modules, by their names in `caffe2.python`."""


def bind() -> None:
    """Bind Caffe2's names as `poseidon.bind()` does, and the names of these modules."""
    poseidon.bind()
    for name in NAMES:
        module = import_module(f"tests.support.caffe2_testing.{name}")
        parent, _, own = f"caffe2.python.{name}".rpartition(".")
        setattr(import_module(parent), own, module)  # for `from caffe2.python import test_util`
        sys.modules[f"caffe2.python.{name}"] = module


class _Plugin:
    def pytest_configure(self) -> None:
        """Bind the names after pytest has loaded hypothesis, whose asserts it rewrites.

        A test draws ten examples, in any time.
        """
        bind()
        from hypothesis import HealthCheck, settings

        checks = list(HealthCheck)
        settings.register_profile(
            "caffe2", deadline=None, max_examples=10, database=None, suppress_health_check=checks
        )
        settings.load_profile("caffe2")


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:], [_Plugin()]))
