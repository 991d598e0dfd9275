"""The file of a module, compared with what Python runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from poseidon.base.python_modules import module_file

FILES = (
    "alone.py",
    "package/__init__.py",
    "package/__main__.py",
    "package/train.py",
    "package/train/part.py",
    "package/inner/__init__.py",
    "plain/train.py",
    "plain/deep/train.py",
    "shadowed/__init__.py",
    "shadowed.py",
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alone", "alone.py"),
        ("package", "package/__main__.py"),
        ("package.train", "package/train.py"),
        ("package.inner", None),
        ("package.none", None),
        ("package.train.part", None),
        ("plain.train", "plain/train.py"),
        ("plain.deep.train", "plain/deep/train.py"),
        ("plain.deep", None),
        ("shadowed", None),
        ("alone.part", None),
        ("none.train", None),
        ("", None),
        ("package.", None),
        ("package/train.py", None),
    ],
)
def test_the_file_is_the_one_that_python_runs(
    name: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    found = module_file(name)
    assert found == (expected and tmp_path / expected)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        assert runpy.run_module(name)["__file__"] == str(found)
    except (ImportError, ValueError):
        assert found is None
    finally:
        for module in set(sys.modules) - before:
            del sys.modules[module]


def test_modules_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert module_file("poseidon") == Path(__file__).parents[3] / "poseidon" / "__main__.py"
    assert module_file("sys") is None
