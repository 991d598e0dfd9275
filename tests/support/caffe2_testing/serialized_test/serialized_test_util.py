"""What Caffe2's tests of operators are built on; their records in files are neither written nor
compared.
"""

from __future__ import annotations

import argparse
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis

from tests.support.caffe2_testing import hypothesis_test_util as hu

given = hypothesis.given


class SerializedTestCase(hu.HypothesisTestCase):
    """A test of operators."""

    def assertSerializedOperatorChecks(self, *args: Any, **kwargs: Any) -> None:
        """Compare nothing: there is no record."""

    @contextmanager
    def set_disable_serialized_check(self, val: bool) -> Iterator[None]:
        """Change nothing: there is no record."""
        yield


def testWithArgs() -> None:
    """Run the tests of the main module; the flags for records are accepted, without effect."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-O", "--output")
    for flag in ("-G", "-D", "-C"):
        parser.add_argument(flag, action="store_true")
    sys.argv[1:] = parser.parse_known_args()[1]
    unittest.main()


testWithArgs.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test
