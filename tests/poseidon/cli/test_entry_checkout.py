"""Scripts of a checkout, started by a Python without packages (`-S`: no site-packages)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "examples", "poseidon", "ps_server", "scripts")
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("benchmarks/*.py", "examples/*/*.py", "scripts/*.py")
    for path in ROOT.glob(pattern)
    if {"__main__", "poseidon.cli.entry"} <= set(re.findall(r"[\w.]+", path.read_text("utf-8")))
)
"""Those that import Poseidon: examples for other libraries do not."""


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
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=30, check=False
    )


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


@pytest.mark.parametrize("words", [["convert_mnist", "."], ["run", "train.py"]])
def test_the_command_says_so_too(checkout: Path, words: list[str]) -> None:
    done = run(checkout, "-m", "poseidon", *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.startswith("poseidon: this Python ")


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


@pytest.fixture
def old_python(checkout: Path) -> Iterator[Path]:
    """The checkout, as it is to a Python that is too old for it."""
    path = checkout / "poseidon" / "cli" / "entry.py"
    text = path.read_text(encoding="utf-8")
    assert "OLDEST = (3, 10)" in text
    path.write_text(text.replace("OLDEST = (3, 10)", "OLDEST = (3, 99)"), encoding="utf-8")
    yield checkout
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("words", [["-m", "poseidon", "train"], ["examples/lstm/make_data.py"]])
def test_an_old_python_is_one_sentence(old_python: Path, words: list[str]) -> None:
    done = run(old_python, *words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    version = sys.version.split()[0]
    assert line == f"poseidon: this Python ({sys.executable}) is {version}; expected 3.99 or newer"


def test_an_old_python_continues_as_that_of_the_environment(old_python: Path) -> None:
    python = old_python / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    # Python 3.9 has no sys.orig_argv.
    code = "import runpy, sys; del sys.orig_argv; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    try:
        done = run(old_python, "-c", code, "examples/lstm/make_data.py", "--c")
    finally:
        shutil.rmtree(old_python / ".venv")
    assert (done.returncode, done.stdout) == (0, "examples/lstm/make_data.py --c\n"), done.stderr


@pytest.fixture
def makefile(tmp_path: Path) -> Path:
    """A folder with the Makefile and what its target setup reads."""
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run `make setup` with a shell script as Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}")
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_refuses_an_old_python_before_it_makes_an_environment(makefile: Path) -> None:
    done = make(
        makefile, f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2)\n$2"\n'
    )
    assert done.returncode == 2
    said, _ = done.stderr.splitlines()
    assert (
        said.startswith("Poseidon needs Python 3.10 or newer, but ") and "is 3.9; run, for" in said
    )
    assert not (makefile / ".venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_completes_an_environment_without_pip(
    makefile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian leaves one where python3-venv is not installed."""
    monkeypatch.delenv("EXTRA", raising=False)  # CI sets it
    python = makefile / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    venv = 'test "$2" = venv && printf "#!/bin/sh\\necho pip \\$*\\n" > $3/bin/python\nexit 0\n'
    done = make(makefile, venv)
    assert done.returncode == 0, done.stderr
    assert "pip -m pip install --no-compile" in done.stdout
    assert "pip -m compileall -q -j 0 -x /testing/ poseidon ps_server .venv/lib/" in done.stdout
    assert (makefile / ".venv" / ".installed-dev").exists()
