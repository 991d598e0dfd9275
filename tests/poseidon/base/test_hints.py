"""Hints are commands that work where they are typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.base.hints import own_command, own_python, short_path


def _program(path: Path, says: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says or path}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment `.venv` with the command, which is not on the path; the working folder is
    beside it.
    """
    monkeypatch.chdir(tmp_path)
    command = _program(tmp_path / ".venv" / "bin" / "poseidon")
    monkeypatch.setattr(sys, "executable", str(command.parent / "python"))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return command


@pytest.mark.parametrize(
    ("folder", "expected"),
    [(".", ".venv/bin/poseidon"), ("mine", "../.venv/bin/poseidon"), (".venv/bin", "./poseidon")],
)
def test_without_an_activated_environment_the_hint_is_a_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch, folder: str, expected: str
) -> None:
    Path(folder).mkdir(exist_ok=True)
    assert own_command(Path(folder)) == expected
    monkeypatch.chdir(folder)
    assert own_command() == expected
    said = subprocess.run(
        own_command(), shell=True, capture_output=True, text=True, check=True
    ).stdout
    assert said == f"{environment}\n"


def test_in_an_activated_environment_the_hint_is_the_name(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{environment.parent}:{os.environ['PATH']}")
    assert own_command() == "poseidon"


def test_another_installation_on_the_path_is_not_named(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = _program(tmp_path / "other" / "poseidon")
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    assert own_command() == ".venv/bin/poseidon"
    monkeypatch.setattr(sys, "argv", [str(other), "train"])  # the command that runs
    assert own_command() == "poseidon"


def test_without_a_command_the_hint_is_the_module(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.unlink()
    assert own_command() == ".venv/bin/python -m poseidon"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my env" / "python"))
    assert own_command() == "'my env/python' -m poseidon"


def test_python_is_the_one_of_this_environment(
    environment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another environment's is a link to the same file."""
    own = environment.parent / "python"
    own.symlink_to(_program(tmp_path / "usr" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "usr"))
    assert own_python() == ".venv/bin/python"
    assert own_python(tmp_path / "mine") == "../.venv/bin/python"
    monkeypatch.setenv("PATH", str(own.parent))
    assert own_python() == "python"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b/c/x", "x"),
        ("/a/b/c/d/x", "d/x"),
        ("d/x", "d/x"),
        ("/a/b/x", "../x"),
        ("/x", "/x"),
        ("/elsewhere/x", "/elsewhere/x"),
    ],
)
def test_a_path_is_as_short_as_can_be(
    path: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/a/b/c")
    assert short_path(Path(path)) == expected
