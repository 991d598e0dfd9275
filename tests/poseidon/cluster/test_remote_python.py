"""Which interpreter runs, and where, as a shell decides it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon.cluster.machinefile import Host
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.remote_python import LauncherEnvironment, remote_command
from poseidon.cluster.ssh.quoting import shell_command

SHOW = "import json, os, sys; print(json.dumps([sys.argv[0] and os.environ.get('MARK'), os.getcwd(), sys.argv[1:]]))"


def own(folder: Path, *, python: str = sys.executable, checkout: str = "") -> LauncherEnvironment:
    return LauncherEnvironment(python=python, checkout=checkout, folder=str(folder))


def client(python: str | None = None, workdir: str | None = None) -> Host:
    return Host(id=0, address="h", port=0, python=python, workdir=workdir)


def module_command(host: Host, launcher: LauncherEnvironment, *module: str) -> tuple[str, ...]:
    return remote_command(host, launcher, *module_arguments(*module))


def run(home: Path, argv: tuple[str, ...]) -> list[object]:
    done = subprocess.run(
        shell_command(argv),
        shell=True,
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    answer: list[object] = json.loads(done.stdout) if done.returncode == 0 else [done.returncode]
    return answer


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "it's home"
    for folder in (home / "work dir", home / "bin"):
        folder.mkdir(parents=True)
    (home / "show.py").write_text(SHOW)
    marked = home / "bin" / "marked"
    marked.write_text(f'#!/bin/sh\nMARK=marked exec {sys.executable} "$@"\n')
    marked.chmod(0o755)
    return home


def test_the_launchers_own_where_the_host_has_them(home: Path, tmp_path: Path) -> None:
    argv = module_command(client(), own(tmp_path), "show", "a b", "$HOME", "")
    assert run(home, argv) == [None, str(tmp_path), ["a b", "$HOME", ""]]


def test_python3_and_home_where_it_has_not(home: Path) -> None:
    argv = module_command(client(), own(home / "absent", python="/absent/python"), "show")
    assert run(home, argv) == [None, str(home), []]


def test_the_machinefile_comes_first(home: Path, tmp_path: Path) -> None:
    argv = module_command(client("~/bin/marked", "~/work dir"), own(tmp_path), "show")
    assert run(home, argv) == ["marked", str(home / "work dir"), []]
    argv = module_command(client(str(home / "bin" / "marked")), own(tmp_path), "show")
    assert run(home, argv) == ["marked", str(tmp_path), []]


def test_the_checkout_is_found_with_our_own_interpreter_alone(home: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "poseidon").mkdir(parents=True)
    (checkout / "other.py").write_text(SHOW)
    launcher = own(tmp_path, checkout=str(checkout))
    assert run(home, module_command(client(), launcher, "other"))[1:] == [
        str(tmp_path),
        [],
    ]
    assert run(home, module_command(client("~/bin/marked"), launcher, "other")) == [1]
    assert run(home, module_command(client(), launcher, "show"))[1:] == [
        str(tmp_path),
        [],
    ]


def test_a_folder_that_is_not_there_is_a_failure(home: Path, tmp_path: Path) -> None:
    assert run(home, module_command(client(workdir="/absent/x"), own(tmp_path), "show")) == [125]
    assert run(home, module_command(client("~/bin/absent"), own(tmp_path), "show")) == [127]
