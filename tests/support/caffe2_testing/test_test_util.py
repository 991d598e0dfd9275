"""The base of Caffe2's own tests."""

from __future__ import annotations

import unittest

from tests.support.caffe2_testing import test_util


class _Test(test_util.TestCase):
    def runTest(self) -> None:
        self.folder = self.make_tempdir()
        assert (self.folder / "..").resolve().is_dir()
        (self.folder / "file").touch()


def test_a_folder_is_there_as_long_as_the_test() -> None:
    case, result = _Test(), unittest.TestResult()
    case.run(result)
    assert result.wasSuccessful(), result.errors
    assert not case.folder.exists()
