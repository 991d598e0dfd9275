"""Scripts of a checkout, started by a Python without packages (`-S`: no site-packages)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "examples", "poseidon", "ps_server", "scripts")
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("benchmarks/*.py", "examples/*/*.py", "scripts/*.py")
    for path in ROOT.glob(pattern)
    if "__main__" in path.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts and packages of the checkout, without an environment."""
    folder = tmp_path_factory.mktemp("checkout").resolve()
    code = shutil.ignore_patterns("__pycache__", "*_lmdb", "*_leveldb", "data", "_temp")
    for name in FOLDERS:
        ignore = None if name in ("poseidon", "ps_server") else code
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "Makefile", folder)
    return folder


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=30, check=False)


def test_without_packages_a_script_says_what_to_run(checkout: Path) -> None:
    started = {
        script: subprocess.Popen(
            [sys.executable, "-S", script],
            cwd=checkout,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for script in SCRIPTS
    }
    for script, process in started.items():
        _, said = process.communicate(timeout=30)
        assert process.returncode == 2, said
        (line,) = said.splitlines()
        assert line.startswith(f"{Path(script).name}: this Python ({sys.executable}) lacks ")
        assert line.endswith(f"; run `make setup` in {checkout} once")


def test_the_command_says_so_too(checkout: Path) -> None:
    done = run(checkout, "-m", "poseidon", "convert_mnist", "folder")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_the_environment_of_the_checkout_is_found(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    try:
        done = run(checkout, "examples/lstm/make_data.py", "a b", "--c")
    finally:
        shutil.rmtree(checkout / ".venv")
    assert (done.returncode, done.stdout) == (0, "-S examples/lstm/make_data.py a b --c\n")


def test_an_environment_that_lacks_packages_is_tried_once(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    try:
        done = run(checkout, "examples/lstm/make_data.py")
    finally:
        shutil.rmtree(checkout / ".venv")
    assert done.returncode == 2
    assert f"this Python ({python}) lacks torch" in done.stderr
