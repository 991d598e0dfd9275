"""Public lists are sorted and say what is there."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import poseidon
import ps_server


@pytest.mark.parametrize("package", [poseidon, ps_server])
def test_a_package_lists_what_it_exports(package: types.ModuleType) -> None:
    path = Path(str(package.__file__))
    stub = path.with_suffix(".pyi")
    source = ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8"))
    imported = [
        name.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.__name__)
        for name in node.names
    ]
    assert sorted(imported) == sorted(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = package.Trainer


def test_importing_the_package_does_nothing_else() -> None:
    program = (
        "import sys; path, names = [*sys.path], {*sys.modules}; import poseidon; "
        "assert dir(poseidon) == sorted(poseidon.__all__); assert sys.path == path; "
        "print(*(name for name in {*sys.modules} - names if name.startswith(('poseidon', 'ps_server', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-E", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.split() == ["poseidon"]


def test_what_watches_over_a_host_does_without_torch() -> None:
    program = (
        "import sys, poseidon.cli.main, poseidon.cli.running_jobs, poseidon.exchange.options, "
        "ps_server; from ps_server import Precision; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=50).returncode == 0
