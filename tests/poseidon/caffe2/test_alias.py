"""`from caffe2.python import core` means this package."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import poseidon.caffe2
poseidon.caffe2.install_alias()
from caffe2.proto import caffe2_pb2
from caffe2.python import core, workspace
from caffe2.python.core import Net
import caffe2.python.scope as scope
import poseidon.caffe2.core, poseidon.caffe2.scope
assert core is poseidon.caffe2.core and scope is poseidon.caffe2.scope and Net is core.Net
assert caffe2_pb2.CUDA == 1
try:
    import caffe2.python.no_such_module
except ModuleNotFoundError as error:
    assert "no_such_module" in str(error)
else:
    raise SystemExit("a module that does not exist was found")
"""


def test_the_alias_gives_the_same_modules() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
