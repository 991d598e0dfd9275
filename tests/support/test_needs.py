"""What a test needs and the machine lacks: skipped with the package's name, failed where that is
asked for, summed up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import HIDE, NEEDS, PACKAGES, STRICT, hide_programs, lacking, summary

ROOT = Path(__file__).parents[2]
TESTS = """
import shutil
import pytest

@pytest.mark.needs("dot")
def test_that_needs_dot():
    assert shutil.which("dot")

def test_that_needs_nothing():
    assert (shutil.which("dot") is None) == {hidden}
    assert shutil.which("env")
"""


def run(
    folder: Path, *words: str, hidden: bool, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Two tests in a process of their own, on a machine whose `dot` is a file of the test."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = needs")
    (folder / "test_two.py").write_text(TESTS.format(hidden=hidden))
    program = folder / "bin" / "dot"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name not in (HIDE, STRICT)}
    own |= {
        "PATH": f"{program.parent}{os.pathsep}{own['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **settings,
    }
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        "pytest.ini",
        *words,
        "test_two.py",
    ]
    own["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        argv, cwd=folder, env=own, capture_output=True, text=True, timeout=50, check=False
    )


def test_a_hidden_program_is_hidden_from_all_and_the_last_line_names_its_package(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "-p", "xdist", "-n", "1", hidden=True, **{HIDE: "dot,sshd"})
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "Skipped tests: drawings of nets (1). To run them: apt-get install graphviz."
    )


def test_a_strict_run_fails_where_a_program_is_absent_alone(tmp_path: Path) -> None:
    done = run(tmp_path, hidden=True, **{HIDE: "dot", STRICT: "1"})
    assert done.returncode == 1
    assert "needs drawings of nets" in done.stdout
    done = run(tmp_path, hidden=False, **{STRICT: "1"})
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout.splitlines()[-1]


def test_a_program_that_no_test_needs_cannot_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDE, "dott")
    with pytest.raises(ValueError, match="POSEIDON_TEST_HIDE: no test needs dott"):
        hide_programs()


def test_packages_come_in_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIDE, ",".join(PACKAGES))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    lacking.cache_clear()
    reasons = [f"Skipped: needs {NEEDS[name].title}: ..." for name in ("sshd", "sshd", "dot")]
    try:
        assert summary([*reasons, "Skipped: another reason"]) == (
            "Skipped tests: SSH (2), drawings of nets (1). "
            "To run them: apt-get install graphviz openssh-client openssh-server."
        )
    finally:
        lacking.cache_clear()
    assert summary(["Skipped: another reason"]) is None


def test_every_program_has_its_package() -> None:
    assert {program for need in NEEDS.values() for program in need.programs} == set(PACKAGES)
