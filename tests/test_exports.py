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


def test_ps_server_lists_what_it_exports() -> None:
    names = [
        name
        for name, value in vars(ps_server).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(names) == ps_server.__all__


def test_poseidon_lists_what_it_exports() -> None:
    source = ast.parse(Path(poseidon.__file__).read_text(encoding="utf-8"))
    imported = [
        name.name
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("poseidon.")
        for name in node.names
    ]
    assert sorted([*imported, "__version__"]) == sorted(poseidon.__all__)
    assert len(set(poseidon.__all__)) == len(poseidon.__all__)
    for name in poseidon.__all__:
        assert getattr(poseidon, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = poseidon.Trainer  # type: ignore[attr-defined]


def test_what_watches_over_a_host_does_without_torch() -> None:
    program = "import sys, poseidon.cli.main, poseidon.cli.ps, poseidon.cli.kill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=50).returncode == 0
