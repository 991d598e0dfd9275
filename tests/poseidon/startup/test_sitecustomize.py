"""A Python that finds the folder on PYTHONPATH binds the names, and is otherwise as without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poseidon.binding import STARTUP

ROOT = Path(__file__).parents[3]
PROGRAM = """
import importlib.util, json, sys
print(json.dumps({
    "caffe": str(getattr(importlib.util.find_spec("caffe"), "origin", None)),
    "path": sys.path,
    "custom": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "heavy": sorted({"torch", "numpy"} & set(sys.modules)),
}))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with the program, for `-m`."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)


def found(*folders: Path, words: tuple[str, ...] = ("-c", PROGRAM)) -> dict[str, Any]:
    """What a Python with these folders on PYTHONPATH finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr.replace("mine\n", "", 1) == "", done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return {**loaded, "mine": done.stderr.count("mine")}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with the user's own sitecustomize."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text(
        "import sys\nprint('mine', file=sys.stderr)\n"
    )
    return tmp_path / "mine"


@pytest.mark.parametrize(
    "words", [("-c", PROGRAM), ("-m", "program"), ("program.py",)], ids=["c", "m", "file"]
)
def test_the_names_are_bound_before_any_code_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    first = tmp_path / "first"
    with_it, without = found(STARTUP, first, ROOT, words=words), found(first, ROOT, words=words)
    assert with_it["caffe"] == str(ROOT / "poseidon/pycaffe/__init__.py")
    assert without["caffe"] == "None"
    assert with_it["path"] == without["path"]
    assert with_it["heavy"] == []


def test_the_sitecustomize_of_the_user_is_run_once(mine: Path) -> None:
    result = found(STARTUP, mine, ROOT)
    assert result["mine"] == 1
    assert result["custom"] == str(mine / "sitecustomize.py")
    assert result["caffe"] == str(ROOT / "poseidon/pycaffe/__init__.py")


def test_a_python_without_poseidon_is_left_alone(mine: Path, tmp_path: Path) -> None:
    """As one that has another project of this name, or another version of Python."""
    (tmp_path / "poseidon").mkdir()
    (tmp_path / "poseidon" / "__init__.py").write_text("")
    result = found(STARTUP, tmp_path, mine)
    assert (result["caffe"], result["mine"]) == ("None", 1)
