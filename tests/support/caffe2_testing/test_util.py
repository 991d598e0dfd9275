"""What Caffe2's own tests are built on: a fresh workspace for each, random blobs."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from poseidon.caffe2 import core, workspace


def rand_array(*dims: int) -> np.ndarray:
    """Return values between -0.5 and 0.5; a scalar array for no dimension."""
    return np.array(np.random.rand(*dims) - 0.5).astype(np.float32)


def randBlob(name: Any, type: Any, *dims: int, **kwargs: Any) -> None:  # noqa: A002 (Caffe2's name)
    """Feed a blob with random values; `offset` is added to them."""
    offset = kwargs.pop("offset", 0.0)
    workspace.FeedBlob(
        name, np.random.rand(*dims).astype(type) + np.array(offset, dtype=type), **kwargs
    )


def randBlobFloat32(name: Any, *dims: int, **kwargs: Any) -> None:
    """Feed a blob with random values."""
    randBlob(name, np.float32, *dims, **kwargs)


def randBlobsFloat32(names: Iterable[Any], *dims: int, **kwargs: Any) -> None:
    """Feed several blobs with random values."""
    for name in names:
        randBlobFloat32(name, *dims, **kwargs)


def randBlobInt32(name: Any, *dims: int, **kwargs: Any) -> None:
    """Feed a blob with random integers from 0 to `high`, which is 1 by default and not included."""
    high = kwargs.pop("high", 1)
    workspace.FeedBlob(name, np.random.randint(0, high, dims).astype(np.int32), **kwargs)


def numOps(net: Any) -> int:
    """Return the number of a net's operators."""
    return len(net.Proto().op)


def str_compare(a: Any, b: Any, encoding: str = "utf8") -> bool:
    """Return whether two strings are equal, bytes decoded."""
    a, b = (text.decode(encoding) if isinstance(text, bytes) else text for text in (a, b))
    return bool(a == b)


def get_default_test_flags() -> list[str]:
    """Return the command line that tests initialise Caffe2 with."""
    return ["caffe2", "--caffe2_log_level=0", "--caffe2_cpu_allocator_do_zero_fill=0"]


class TestCase(unittest.TestCase):
    """A test with an empty workspace."""

    @classmethod
    def setUpClass(cls) -> None:
        """See `unittest.TestCase`."""
        workspace.GlobalInit(get_default_test_flags())
        core.RefreshRegisteredOperators()

    def setUp(self) -> None:
        """See `unittest.TestCase`."""
        self.ws = workspace.C.Workspace()
        workspace.ResetWorkspace()

    def tearDown(self) -> None:
        """See `unittest.TestCase`."""
        workspace.ResetWorkspace()

    def make_tempdir(self) -> Path:
        """Return a new folder, which is removed after the test."""
        folder = tempfile.TemporaryDirectory(prefix="caffe2_test.")
        self.addCleanup(folder.cleanup)
        return Path(folder.name)
