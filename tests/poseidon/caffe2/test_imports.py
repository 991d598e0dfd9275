"""Every module can be the first one that a process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.startswith("poseidon.caffe2.") and "proto" not in module]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


@pytest.mark.timeout(300)
def test_each_module_can_be_imported_first() -> None:
    """One process, in which the others are forgotten before each: protobuf's messages can be
    defined only once.
    """
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "poseidon" / "caffe2").rglob("*.py"))
        if "proto" not in path.parts
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert done.stdout == ""
